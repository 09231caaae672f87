"""Where each request of a vLLM engine core stands, as our planner sees it.

Owns: a `SequenceState` for each of vLLM's requests, the lines that they stand in, and the plan of a step. Imports
cluster and cluster.engine.scheduling, never vllm: what it is told of a request are numbers. Invariants: each request
is waiting (with blocks: paused), running, or aside; its key is the order's for its state when it joined the line. Who is
aside is in no plan and keeps its blocks: frozen for a move (without blocks: parked), or loading, while a KV connector
fills them.

vLLM gives a prompt its blocks chunk by chunk, our planner all at once. The blocks that a prompt's rest will need are
therefore promised: they count as held by it and not as free, though vLLM's pool still has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cluster.config import EngineConfig
from cluster.engine.scheduling.choose import order_for, planner_for
from cluster.engine.scheduling.giving import Shared
from cluster.engine.scheduling.plan import StepPlan, View
from cluster.engine.scheduling.sequence import Line, SequenceState
from cluster.engine.vllm.wire import RequestNote
from cluster.lengths import LengthPredictor

CachedBlocks = Callable[[str], tuple[int, int]]
"""Core id -> blocks at its beginning that the prefix cache has, and how many of them nobody holds."""
SharedBlocks = Callable[[str], Shared]
"""Core id -> those of its blocks that others hold too."""


class Tracked:
    """One request. `held_blocks` are those that vLLM has given it; `state.blocks` are these and the promised ones."""

    __slots__ = ("core_id", "foretold_tokens", "frozen", "held_blocks", "loading", "note", "state")

    def __init__(self, core_id: str, note: RequestNote, max_model_len: int) -> None:
        self.core_id = core_id
        self.note = note
        self.held_blocks = 0
        self.frozen = False
        self.loading = False
        self.foretold_tokens: float | None = None
        """Output that was predicted before its first token; None where a part of it was there already, or none is to come."""
        self.state = SequenceState(
            (note.request_id, note.attempt),
            note.priority,
            note.arrived_unix_s,
            tokens=note.prompt_tokens + note.emitted_tokens,
            started=note.emitted_tokens > 0 or note.moved,
            prompt_tokens=note.prompt_tokens,
            limit_tokens=min(note.prompt_tokens + max(1, note.sampling.max_tokens), max_model_len),
        )

    @property
    def promised_blocks(self) -> int:
        return self.state.blocks - self.held_blocks

    @property
    def aside(self) -> bool:
        return self.frozen or self.loading

    @property
    def place(self) -> str:
        """For tests and diagnosis."""
        if self.loading:
            return "loading"
        if self.frozen:
            return "frozen" if self.state.blocks else "parked"
        if self.state.running:
            return "running"
        return "paused" if self.state.blocks else "waiting"

    @property
    def at_limit(self) -> bool:
        """Its last token is on its way; it runs no more."""
        return self.state.tokens >= self.state.limit_tokens


class Ledger:
    def __init__(self, config: EngineConfig) -> None:
        self.waiting = Line()
        self.running = Line()
        self.loading: set[str] = set()
        """Core ids."""
        self._config = config
        self._order = order_for(config)
        self._planner = planner_for(config.mode)
        self._lengths = LengthPredictor()
        self._foretold: list[tuple[str, float]] = []
        """Of those that have ended by themselves and are not told yet."""
        self._by_id: dict[str, Tracked] = {}
        self._by_state: dict[SequenceState, Tracked] = {}
        self._slots: dict[int, EngineConfig] = {}
        """The configuration with so many slots fewer."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, core_id: str) -> bool:
        return core_id in self._by_id

    def get(self, core_id: str) -> Tracked:
        return self._by_id[core_id]

    def of(self, state: SequenceState) -> Tracked:
        return self._by_state[state]

    def run_order(self) -> Iterable[Tracked]:
        """All that have a slot, most urgent first."""
        return (self._by_state[state] for state in self.running.items)

    def wait_order(self) -> Iterable[Tracked]:
        return (self._by_state[state] for state in self.waiting.items)

    def all(self) -> Iterable[Tracked]:
        return self._by_id.values()

    # --- where it stands ---

    def add(self, core_id: str, note: RequestNote) -> None:
        """A new one; it waits."""
        tracked = Tracked(core_id, note, self._config.max_model_len)
        self._by_id[core_id] = tracked
        self._by_state[tracked.state] = tracked
        self._predict(tracked)
        if note.sampling.max_tokens > 0 and not note.emitted_tokens:
            tracked.foretold_tokens = tracked.state.predicted_tokens - note.prompt_tokens
        self._join(self.waiting, tracked)

    def run(self, core_id: str, held_blocks: int) -> None:
        """A waiting one has got a slot, and has so many blocks."""
        tracked = self._by_id[core_id]
        state = tracked.state
        self._leave(tracked)
        tracked.held_blocks = held_blocks
        state.blocks = self._counts_for(state, held_blocks)
        state.running = state.started = True
        state.overtaken = state.yields = 0
        self._join(self.running, tracked)

    def pause(self, core_id: str) -> None:
        """A running one gives up its slot and keeps its blocks."""
        tracked = self._by_id[core_id]
        self._leave(tracked)
        self._wait(tracked)

    def drop(self, core_id: str, tokens: int, *, for_urgent: bool) -> None:
        """It has lost its blocks; it has `tokens` tokens, and if it ran or was paused it waits at its place."""
        tracked = self._by_id[core_id]
        state = tracked.state
        self._leave(tracked)
        state.tokens, state.computed, state.blocks, tracked.held_blocks = tokens, 0, 0, 0
        state.pushed_out += for_urgent
        self._wait(tracked)

    def freeze(self, core_id: str) -> None:
        """Aside with all that it holds, until it is thawed."""
        tracked = self._by_id[core_id]
        self._leave(tracked)
        tracked.state.running = False
        tracked.frozen = True

    def thaw(self, core_id: str) -> None:
        """Back at its place among those that wait."""
        tracked = self._by_id[core_id]
        tracked.frozen = False
        self._wait(tracked)

    def load(self, core_id: str, held_blocks: int) -> None:
        """A waiting one has got blocks that a KV connector fills."""
        tracked = self._by_id[core_id]
        self._leave(tracked)
        tracked.loading = True
        tracked.held_blocks = tracked.state.blocks = held_blocks
        self.loading.add(core_id)

    def loaded(self, core_id: str, *, computed: int, held_blocks: int) -> None:
        """The connector is done with it, and so many positions are in its blocks; it waits at its place."""
        tracked = self._by_id[core_id]
        self.loading.remove(core_id)
        tracked.loading = False
        tracked.held_blocks = tracked.state.blocks = held_blocks
        tracked.state.computed = computed
        self._wait(tracked)

    def remove(self, core_id: str) -> Tracked:
        """It is live no more, wherever it stood."""
        tracked = self._by_id.pop(core_id)
        del self._by_state[tracked.state]
        self.loading.discard(core_id)
        self._leave(tracked)
        return tracked

    # --- what becomes of it ---

    def update(self, tracked: Tracked, *, tokens: int, computed: int, held_blocks: int) -> None:
        """What a running one has now: its tokens, those that are on their way included, and its blocks."""
        state = tracked.state
        grew = tokens > state.tokens
        self.correct(tracked, tokens=tokens, computed=computed)
        tracked.held_blocks = held_blocks
        blocks = self._counts_for(state, held_blocks)
        if blocks != state.blocks:
            self.running.grow(state, blocks - state.blocks)
            state.blocks = blocks
        if grew and (tokens % self._config.block_size_tokens == 0 or tokens + 1 > state.predicted_tokens):
            self._leave(tracked)
            self._predict(tracked)
            self._join(self.running, tracked)

    def correct(self, tracked: Tracked, *, tokens: int, computed: int) -> None:
        """It has so many tokens, and so many of them are computed."""
        state = tracked.state
        left = state.prompt_left
        state.tokens, state.computed = tokens, computed
        if left != state.prompt_left and not tracked.aside:
            (self.running if state.running else self.waiting).ran(state, left - state.prompt_left)

    def learn(self, tracked: Tracked, output_tokens: int) -> None:
        """One has ended by itself after so many output tokens, those of earlier attempts included."""
        note = tracked.note
        if note.sampling.max_tokens > 0:
            self._lengths.observe(note.tenant, note.priority_class, note.prompt_tokens, output_tokens)
        if tracked.foretold_tokens is not None:
            self._foretold.append((note.priority_class, output_tokens / tracked.foretold_tokens))

    def take_foretold(self) -> tuple[tuple[str, float], ...]:
        """Of those that have ended by themselves since this was last asked: the class, and the output over what was predicted
        of it when they came."""
        told, self._foretold = tuple(self._foretold), []
        return told

    # --- the plan ---

    def promised_blocks(self) -> int:
        """Blocks that vLLM's pool still has and that are not to be given away."""
        states = (*self.running.items, *self.waiting.holding)
        return sum(self._by_state[state].promised_blocks for state in states)

    def settled(self, blocks_free: int) -> bool:
        """Whether the plan would change nothing: nobody waits, all decode, and each can have a block."""
        if self.waiting.items or blocks_free < len(self.running):
            return False
        return all(state.tokens - state.computed <= 1 for state in self.running.items)

    def plan(self, pool_blocks_free: int, cached: CachedBlocks, shared: SharedBlocks) -> StepPlan:
        """What is to happen in the next step. `pool_blocks_free` are those of vLLM's pool, the promised included."""
        running = [state for state in self.running.items if not self._by_state[state].at_limit]
        view = View(
            self.waiting.items,
            running,
            pool_blocks_free - self.promised_blocks(),
            cached_blocks=lambda state: cached(self._by_state[state].core_id)[0],
            unheld_blocks=lambda state: cached(self._by_state[state].core_id)[1],
            paused=self.waiting.holding,
            shared=lambda state: shared(self._by_state[state].core_id),
        )
        plan = self._planner(view, self._with_slots(len(self.running) - len(running)), self._order)
        for state in plan.yielded:
            state.yields += 1
        for state in plan.overtaken:
            state.overtaken += 1
        return plan

    def _counts_for(self, state: SequenceState, held_blocks: int) -> int:
        """Its blocks with the promised ones: with a prompt still to run, for all its tokens and the next."""
        if state.tokens - state.computed <= 1:
            return held_blocks
        return max(held_blocks, -(-min(state.tokens + 1, state.limit_tokens) // self._config.block_size_tokens))

    def _with_slots(self, fewer: int) -> EngineConfig:
        """Those at their limit keep their slot until their last token has come."""
        if not fewer:
            return self._config
        if fewer not in self._slots:
            self._slots[fewer] = self._config.model_copy(update={"slots": self._config.slots - fewer})
        return self._slots[fewer]

    def _predict(self, tracked: Tracked) -> None:
        note, state = tracked.note, tracked.state
        output = self._lengths.predict(
            note.tenant,
            note.priority_class,
            note.prompt_tokens,
            max_tokens=state.limit_tokens - note.prompt_tokens,
            made=state.tokens - note.prompt_tokens,
            stated=note.stated_output_tokens,
        )
        state.expect(output)

    def _wait(self, tracked: Tracked) -> None:
        tracked.state.running = False
        tracked.state.yields = 0
        if not tracked.aside:
            self._join(self.waiting, tracked)

    def _join(self, line: Line, tracked: Tracked) -> None:
        state = tracked.state
        state.key = self._order.key(state)
        line.add(state, state.blocks)

    def _leave(self, tracked: Tracked) -> None:
        state = tracked.state
        if not tracked.aside:
            (self.running if state.running else self.waiting).remove(state, state.blocks)
