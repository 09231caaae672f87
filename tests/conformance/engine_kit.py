"""What tests of the engine share: a tokenizer, requests, and a reference that knows no engine.

`undisturbed` computes a request's whole output in a plain loop over a list: no blocks, no batches, no preemption, and
its text with the tokenizer's own `decode`. What the next token is, a `PlainModel` says.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from typing import Protocol

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from cluster.config import EngineConfig
from cluster.engine.chance import uniform
from cluster.engine.engine import Engine
from cluster.engine.text import TextCodec
from cluster.ports import Penalties, RowOutput, SampleSpec, StepResult
from cluster.types import FinishReason, Request, RequestId, Sampling, TokenDelta, TokenLogprob
from tests.conformance.arithmetic_backend import ArithmeticBackend, digest, draw, extended, logprob

CORPUS = (
    "the basin above a power station holds the water back and meters it to the turbines",
    "naïve café, Ärger über Öl, façade; ¿qué? ελληνικά и кириллица",
    "水を貯めて発電所へ送る 你好世界 春眠不觉晓",
    "👋🏽 👩‍👩‍👧 🇨🇭 🚀🚀 ❤️‍🔥",
    "def f(x):\n    return x * 2  # twice\n",
)


@cache
def byte_level_tokenizer() -> Tokenizer:
    """GPT-2's kind: every byte has a token, so a random model often writes half characters and invalid bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("naïve tool", special=False)])
    return tokenizer


@cache
def byte_level_codec() -> TextCodec:
    return TextCodec(byte_level_tokenizer())


EOS = 0
"""The id of <|end|>."""


def vocab_size() -> int:
    return byte_level_tokenizer().get_vocab_size()


def config(**changes: object) -> EngineConfig:
    """A small engine: 4 slots, 16 tokens per step, 64 blocks of 4 tokens."""
    values: dict[str, object] = {
        "slots": 4,
        "step_token_budget": 16,
        "block_size_tokens": 4,
        "blocks": 64,
        "max_model_len": 128,
        "max_held": 4096,
    }
    return EngineConfig.model_validate({**values, **changes})


def request(
    name: str,
    *,
    prompt: int | tuple[int, ...] = 5,
    priority: int = 0,
    arrived: float = 0.0,
    emitted: tuple[int, ...] = (),
    max_tokens: int = 8,
    temperature: float = 0.0,
    seed: int = 0,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = True,
    tenant: str = "t",
    group: str = "",
    choice: int = 0,
    **sampling: object,
) -> Request:
    """`prompt` is its ids, or a length to be filled with ids derived from the name. `sampling` are more fields of it."""
    if isinstance(prompt, int):
        prompt = prompt_of(name, prompt)
    base = Sampling(max_tokens=max_tokens, seed=seed, temperature=temperature, stop=stop, ignore_eos=ignore_eos)
    return Request(
        request_id=RequestId(name),
        tenant=tenant,
        priority=priority,
        priority_class="c",
        arrived_unix_s=arrived,
        prompt_ids=prompt,
        emitted_ids=emitted,
        sampling=msgspec.structs.replace(base, **sampling),
        group_id=group,
        choice=choice,
    )


def prompt_of(name: str, tokens: int) -> tuple[int, ...]:
    """So many token ids derived from a name."""
    rng = random.Random(name)
    return tuple(rng.randrange(vocab_size()) for _ in range(tokens))


def engine(settings: EngineConfig | None = None, backend: ArithmeticBackend | None = None) -> Engine:
    settings = settings or config()
    return Engine(settings, backend or backend_for(settings), byte_level_codec(), (EOS,))


def backend_for(settings: EngineConfig) -> ArithmeticBackend:
    return ArithmeticBackend(settings.blocks, settings.block_size_tokens, vocab_size())


@dataclass
class Output:
    """All that an attempt gave, put together from its deltas."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    pieces: list[str] = field(default_factory=list)
    """Of the text, one per token."""
    finish: FinishReason | None = None
    ends: int = 0
    first_token_step: int | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """Of the first delta; None before it."""
    cached_tokens: int = 0
    """Of the prompt, as told with the first token."""
    error: str = ""
    undecided: bool = False
    """What would follow the tokens is not known (see `UndecidedError`)."""

    def take(self, delta: TokenDelta, step: int = 0, *, first_index: int = 0) -> None:
        assert delta.index == first_index + len(self.token_ids), "tokens lost or doubled"
        assert len(delta.token_ids) == len(delta.pieces)
        assert not self.ends, "something came after the end"
        if delta.token_ids and self.first_token_step is None:
            self.first_token_step = step
        assert self.prompt_logprobs is None or not delta.prompt_logprobs, "scores come with the first delta only"
        if self.prompt_logprobs is None:
            self.prompt_logprobs = delta.prompt_logprobs
        assert not delta.cached_tokens or not self.token_ids, "what was cached is told with the first delta only"
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        assert len(self.logprobs) in (0, len(self.token_ids)), "one logprob per token, or none"
        self.pieces.extend(delta.pieces)
        self.text += "".join(delta.pieces)
        if delta.finish is not None:
            self.ends += 1
            self.finish = delta.finish
            self.error = delta.error


def same(got: Output, expected: Output) -> bool:
    """Whether two outputs say the same, whatever they are made of."""
    return (got.token_ids, got.text, got.finish, got.ends, got.logprobs, got.prompt_logprobs) == (
        expected.token_ids,
        expected.text,
        expected.finish,
        expected.ends,
        expected.logprobs,
        expected.prompt_logprobs,
    )


def begins(got: Output, expected: Output) -> bool:
    """Whether `got` is how `expected` begins, wherever it was cut off."""
    n = len(got.token_ids)
    return (
        got.token_ids == expected.token_ids[:n]
        and got.logprobs == expected.logprobs[:n]
        and expected.text.startswith(got.text)
    )


def collect(
    target: Engine,
    outputs: dict[str, Output] | None = None,
    *,
    steps: int = 100_000,
    first: Mapping[str, int] | None = None,
) -> dict[str, Output]:
    """Step until nothing is left to do, checking the books after each step."""
    outputs = {} if outputs is None else outputs
    for step in range(steps):
        if not target.has_work:
            return outputs
        gather(target.step(), outputs, step, first)
        target.check_integrity()
    raise AssertionError(f"not done after {steps} steps")


def gather(
    result: StepResult, outputs: dict[str, Output], step: int = 0, first: Mapping[str, int] | None = None
) -> None:
    for delta in result.deltas:
        output = outputs.setdefault(delta.request_id, Output())
        output.take(delta, step, first_index=(first or {}).get(delta.request_id, 0))


class UndecidedError(Exception):
    """Two candidates for the next token are closer than rounding: a model cannot say which an engine will take."""


class PlainModel(Protocol):
    """What gives the next token, and knows neither requests nor engines."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def eos(self) -> int:
        """The token that ends a request."""
        ...

    def draw(self, token_ids: Sequence[int], sample: SampleSpec) -> RowOutput:
        """The token after these.

        Raises:
            UndecidedError: it depends on rounding.
        """
        ...

    def scores(self, token_ids: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
        """How likely each but the first was after those before it."""
        ...


class ArithmeticModel:
    """What `ArithmeticBackend` computes, without a store."""

    eos = EOS

    def __init__(self) -> None:
        self.tokenizer = byte_level_tokenizer()
        self._last: tuple[list[int], list[bytes]] = ([], [b""])
        """Tokens, and what is held before and at each of them."""

    def draw(self, token_ids: Sequence[int], sample: SampleSpec) -> RowOutput:
        return draw(digest(self._states(token_ids)), sample, vocab_size())

    def scores(self, token_ids: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
        states = self._states(token_ids)
        return tuple(logprob(states[k], token_ids[k], vocab_size(), top) for k in range(1, len(token_ids)))

    def _states(self, token_ids: Sequence[int]) -> list[bytes]:
        known, states = self._last
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(known, token_ids, strict=False)))
        states = states[: same + 1]
        for token_id in token_ids[same:]:
            states.append(extended(states[-1], token_id))
        self._last = (list(token_ids), states)
        return states


@cache
def arithmetic_model() -> ArithmeticModel:
    return ArithmeticModel()


def undisturbed(r: Request, *, max_model_len: int, model: PlainModel | None = None) -> Output:
    """The output of a request alone, by a plain loop; on the arithmetic model where none is given. Of one that is
    `undecided` somewhere, what comes before."""
    model = model or arithmetic_model()
    s = r.sampling
    prompt, out = list(r.prompt_ids), Output(finish=FinishReason.LENGTH, ends=1, prompt_logprobs=())
    if s.prompt_logprobs is not None:
        out.prompt_logprobs = model.scores(prompt, s.prompt_logprobs)
    while len(out.token_ids) < s.max_tokens and len(prompt) + len(out.token_ids) < max_model_len:
        try:
            drawn = model.draw(prompt + out.token_ids, _specification(r, out.token_ids, model.eos))
        except UndecidedError:
            out.undecided = True
            break
        assert drawn.token_id is not None
        out.token_ids.append(drawn.token_id)
        if drawn.logprob is not None:
            out.logprobs.append(drawn.logprob)
        if drawn.token_id == model.eos and not s.ignore_eos:
            out.finish = FinishReason.STOP
            break
        if s.stop and _cut(out.token_ids, s, model.tokenizer) is not None:
            out.finish = FinishReason.STOP
            break
    text = decoded(out.token_ids, model.tokenizer)
    cut = _cut(out.token_ids, s, model.tokenizer)
    out.text = text if cut is None else cut
    return out


def _specification(r: Request, output: list[int], eos: int) -> SampleSpec:
    """How the next token after `output` is drawn, as `Sampling` says it."""
    s = r.sampling
    penalized = (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) != (0.0, 0.0, 1.0)
    return SampleSpec(
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        uniform=uniform(s.seed, r.choice, len(output)) if s.temperature > 0 else 0.0,
        min_p=s.min_p,
        bias=s.logit_bias,
        banned=(eos,) if len(output) < s.min_tokens and not s.ignore_eos else (),
        penalties=Penalties(
            s.presence_penalty, s.frequency_penalty, s.repetition_penalty, Counter(output), r.prompt_ids
        )
        if penalized
        else None,
        logprobs=s.logprobs,
    )


def _cut(output: list[int], s: Sampling, tokenizer: Tokenizer) -> str | None:
    """The text before a stop string, or None; what the first `min_tokens` tokens complete is none."""
    first_end = len(decoded(output[: s.min_tokens], tokenizer)) + 1
    return cut_at_stop(decoded(output, tokenizer), s.stop, first_end)


def decoded(token_ids: Iterable[int], tokenizer: Tokenizer | None = None) -> str:
    """The tokenizer's own text, less the replacement characters of a last character that is not yet complete."""
    tokenizer = tokenizer or byte_level_tokenizer()
    ids = list(token_ids)
    raw = b"".join(_bytes_of(tokenizer, i) for i in ids)
    whole: str = tokenizer.decode(ids, skip_special_tokens=True)
    for tail in range(min(3, len(raw)), 0, -1):
        if _begins_a_character(raw[len(raw) - tail :]):
            return whole[:-1]  # decoding shows the unfinished bytes as one replacement character
    return whole


def cut_at_stop(text: str, stop: tuple[str, ...], first_end: int = 1) -> str | None:
    """`text` before the stop string that completes first (the longest of those), or None; by looking at each end."""
    for end in range(first_end, len(text) + 1):
        starts = [end - len(s) for s in stop if s and text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return None


def _bytes_of(tokenizer: Tokenizer, token_id: int) -> bytes:
    token = tokenizer.id_to_token(token_id)
    added = tokenizer.get_added_tokens_decoder().get(token_id)
    if token is None or (added is not None and added.special):
        return b""
    marks = {v: k for k, v in _byte_marks().items()}
    return bytes(marks[c] for c in token) if all(c in marks for c in token) else token.encode()


@cache
def _byte_marks() -> dict[int, str]:
    """byte -> its sign, asked from the library: the pre-tokenizer writes a character's bytes in signs."""
    marks: dict[int, str] = {}
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for code in [*range(0x800), *range(0x800, 0x10000, 0x800), *range(0x10000, 0x110000, 0x10000)]:
        if 0xD800 <= code < 0xE000:
            continue
        char = chr(code)
        signs = "".join(piece for piece, _ in splitter.pre_tokenize_str(char))
        marks.update(zip(char.encode(), signs, strict=True))
    return marks


def _begins_a_character(data: bytes) -> bool:
    """Whether these bytes are the beginning, and not all, of a UTF-8 character."""
    for rest in (b"\x80", b"\xbf"):
        for length in range(1, 4):
            try:
                if len((data + rest * length).decode()) == 1:
                    return True
            except UnicodeDecodeError:
                continue
    return False
