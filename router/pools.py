"""The models behind one router, each with replicas, a queue and an order of its own.

Owns: which model a request asks for, and what its answer needs of that model. Imports the core, parsers and vocabularies;
no web framework. Invariant: no model's work waits for another's, since they share no capacity: what is shared is only
who may ask, and how much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from cluster.config import RouterConfig
from cluster.messages import ModelStatus
from cluster.model import ModelFolder
from cluster.ports import Clock
from cluster.types import RequestId
from router.answers import ModelCard
from router.core import RouterCore
from router.errors import ApiError
from router.explain import Explanation
from router.logprobs import Vocabulary
from router.openai import Api, Origin, Prepared, RequestParser, unknown_model
from router.recent import Recent, RecentDecisions


class _Named(msgspec.Struct):
    """What of a body says for which model it is."""

    model: str | None = None


_named = msgspec.json.Decoder(_Named).decode


class Pool:
    """One model: what makes its prompts and its answers, and the core that has its work done."""

    def __init__(
        self,
        model: ModelFolder,
        core: RouterCore,
        max_model_len: int,
        config: RouterConfig,
        aliases: Sequence[str] = (),
    ) -> None:
        """Read the model's tokenizer and compile its chat template.

        Raises:
            ChatTemplateError: the template does not compile.
        """
        self.name = model.name
        self.names = (model.name, *aliases)
        self.identity = model.identity
        self.core = core
        self.parser = RequestParser(model, max_model_len, config.classes, config.default_class, aliases)
        self.vocabulary = Vocabulary(self.parser.prompts.codec, model.eos_token_ids)
        created = int(core.clock.unix())
        self.cards = {name: ModelCard(name, created, max_model_len, root=model.name) for name in self.names}

    @property
    def status(self) -> ModelStatus:
        core = self.core
        return ModelStatus(self.name, core.ready, core.bands(), core.unroutable(), core.moves())


class Pools:
    """All models of a router, in the order of its profile."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        """Raises ValueError where there is none, or two share a name."""
        self._pools = tuple(pools)
        self._by_name = {name: pool for pool in pools for name in pool.names}
        if not pools or len(self._by_name) < sum(len(pool.names) for pool in pools):
            raise ValueError(f"models must have names that differ, got {[pool.names for pool in pools]}")
        self._recent = Recent()
        for pool in pools:
            pool.core.watch(self._recent.noting(pool.name))

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools)

    def __getitem__(self, name: str) -> Pool:
        """By any of its names. Raises ApiError where no model has it."""
        pool = self._by_name.get(name)
        if pool is None:
            raise unknown_model(name, tuple(self._by_name))
        return pool

    @property
    def clock(self) -> Clock:
        return self._pools[0].core.clock

    @property
    def ready(self) -> bool:
        """Whether any model can take work: a balancer that took this router away would take that too."""
        return any(pool.core.ready for pool in self._pools)

    def of(self, raw: bytes) -> Pool:
        """The model that a body names, found without reading the rest of it. Where there is one model, that one; for a
        body that cannot be read the first: the parsers of all refuse it alike.

        Raises:
            ApiError: 404 for a model that is not here, 400 where none of several is named.
        """
        if len(self._pools) == 1:
            return self._pools[0]
        try:
            name = _named(raw).model
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return self._pools[0]
        if name is None:
            message = f"Missing parameter: 'model'; this server has {', '.join(map(repr, self._by_name))}."
            raise ApiError(400, message, param="model", code="missing_required_parameter")
        return self[name]

    def prepare(self, api: Api, raw: bytes, origin: Origin) -> Prepared:
        """`RequestParser.prepare` of the model that the body names. Raises ApiError as that and `of` do."""
        return self.of(raw).parser.prepare(api, raw, origin)

    def recent(self, after: int | None, limit: int) -> RecentDecisions:
        """What was decided last, about requests of any model; see `Recent.after`."""
        return self._recent.after(after, limit, self.clock.unix() - self.clock.monotonic())

    def explain(self, request_id: RequestId, tenant: str | None) -> Explanation | None:
        """`RouterCore.explain`, whichever model it was for."""
        said = (pool.core.explain(request_id, tenant) for pool in self._pools)
        return next((explanation for explanation in said if explanation is not None), None)
