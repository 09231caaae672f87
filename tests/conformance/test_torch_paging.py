"""The KV cache of the torch backend is really paged: where blocks lie, and what others left in them, changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from cluster.config import EngineConfig
from cluster.engine.torch.backend import TorchBackend, out_of_memory_by_name
from cluster.model import ModelFolder
from cluster.ports import OutOfMemoryError, Row, RowOutput
from tests.conformance.torch_kit import GREEDY, HandDriver, random_prompts

CONFIG = EngineConfig(slots=8, step_token_budget=24, block_size_tokens=4, blocks=256, max_model_len=256)
PROMPTS = random_prompts([1, 6, 13, 30, 47, 64], 1024, seed=3)
TOKENS = 20


@pytest.fixture(scope="module")
def backend(tiny_model: ModelFolder) -> TorchBackend:
    return TorchBackend(tiny_model, CONFIG)


@pytest.fixture(scope="module")
def undisturbed(tiny_model: ModelFolder) -> list[list[int]]:
    return HandDriver(TorchBackend(tiny_model, CONFIG), CONFIG).generate(PROMPTS, TOKENS)


def pools(backend: TorchBackend) -> list[torch.Tensor]:
    return [*backend.cache.keys, *backend.cache.values]


def drawn(outputs: Sequence[RowOutput]) -> list[int | None]:
    return [output.token_id for output in outputs]


def run(backend: TorchBackend, disturb: Callable[[HandDriver, int], None], seed: int = 0) -> list[list[int]]:
    driver = HandDriver(backend, CONFIG, seed)
    return driver.generate(PROMPTS, TOKENS, before_step=lambda step: disturb(driver, step))


def test_outputs_survive_a_permutation_of_all_physical_blocks_in_mid_run(
    backend: TorchBackend, undisturbed: list[list[int]]
) -> None:
    generator = torch.Generator().manual_seed(5)
    permutations = 0

    def permute(driver: HandDriver, step: int) -> None:
        nonlocal permutations
        moved_to: list[int] = torch.randperm(CONFIG.blocks, generator=generator).tolist()
        for pool in pools(backend):
            pool[moved_to] = pool.clone()
        driver.tables = {i: [moved_to[b] for b in table] for i, table in driver.tables.items()}
        driver.free = [moved_to[b] for b in driver.free]
        permutations += 1

    assert run(backend, permute) == undisturbed
    assert permutations > TOKENS


def test_outputs_do_not_depend_on_which_blocks_are_handed_out(
    backend: TorchBackend, undisturbed: list[list[int]]
) -> None:
    for seed in (1, 2):
        assert run(backend, lambda driver, step: None, seed) == undisturbed


@pytest.mark.parametrize("leftover", [float("nan"), float("inf"), 1e30])
def test_what_an_earlier_owner_left_in_a_block_has_no_influence(
    backend: TorchBackend, undisturbed: list[list[int]], leftover: float
) -> None:
    for pool in pools(backend):
        pool.fill_(leftover)
    assert run(backend, lambda driver, step: None) == undisturbed


def test_blocks_of_others_are_neither_read_nor_written(backend: TorchBackend, undisturbed: list[list[int]]) -> None:
    marker = 123.0

    def spoil_free_blocks(driver: HandDriver, step: int) -> None:
        for pool in pools(backend):
            if step:
                assert bool((pool[driver.free] == marker).all())
            pool[driver.free] = marker

    assert run(backend, spoil_free_blocks) == undisturbed


def test_a_changed_block_does_change_the_output(backend: TorchBackend, undisturbed: list[list[int]]) -> None:
    """Guards the tests above: were the cache not read, they would all hold."""

    def clear_first_block_of_last(driver: HandDriver, step: int) -> None:
        if step == 12:
            for pool in pools(backend):
                pool[driver.tables[5][0]] = 0

    outputs = run(backend, clear_first_block_of_last)
    assert outputs[:5] == undisturbed[:5]
    assert outputs[5] != undisturbed[5]


def test_two_sequences_can_share_the_blocks_of_a_common_prefix(
    backend: TorchBackend, undisturbed: list[list[int]]
) -> None:
    prefix, ends = tuple(PROMPTS[3][:24]), [(7, 9, 11), (500, 501)]
    shared = tuple(range(10, 16))
    backend.run([Row(token_ids=prefix, start=0, block_table=shared, sample=None)])
    rows = [Row(token_ids=end, start=24, block_table=(*shared, 20 + i), sample=GREEDY) for i, end in enumerate(ends)]
    together = backend.run(rows)
    for i, end in enumerate(ends):
        alone = Row(token_ids=(*prefix, *end), start=0, block_table=tuple(range(40, 47)), sample=GREEDY)
        assert drawn(backend.run([alone])) == drawn([together[i]])


def test_each_row_has_its_output_in_its_place(backend: TorchBackend) -> None:
    prompts = random_prompts([1, 5, 1, 9, 2], 1024, seed=8)
    rows = [
        Row(token_ids=tuple(p), start=0, block_table=(3 * i, 3 * i + 1, 3 * i + 2), sample=None if i == 3 else GREEDY)
        for i, p in enumerate(prompts)
    ]
    alone = [drawn(backend.run([row]))[0] for row in rows]
    assert [token_id is None for token_id in alone] == [False, False, False, True, False]
    assert drawn(backend.run(rows)) == alone
    assert drawn(backend.run(rows[::-1])) == alone[::-1]
    assert backend.run([]) == []


def test_padding_changes_neither_outputs_nor_cache(backend: TorchBackend) -> None:
    rows = [
        Row(token_ids=tuple(p), start=0, block_table=(3 * i, 3 * i + 1, 3 * i + 2), sample=GREEDY)
        for i, p in enumerate(random_prompts([1, 5, 12], 1024, seed=9))
    ]
    plain = drawn(backend.run(rows))
    before = backend.cache.pool.clone()
    assert drawn(backend.run(rows, padding_tokens=7)) == plain
    torch.testing.assert_close(backend.cache.pool, before, atol=1e-4, rtol=1e-4, equal_nan=True)
    untouched = [b for b in range(CONFIG.blocks) if all(b not in row.block_table for row in rows)]
    assert bytes(backend.save_blocks(untouched)) == before[untouched].numpy().tobytes()


def test_copied_and_moved_blocks_continue_as_their_source(tiny_model: ModelFolder, backend: TorchBackend) -> None:
    """Copied within a pool, swapped out and in again elsewhere, and carried to another engine of the same format."""
    prompt = PROMPTS[3]
    source = tuple(range(8))
    first = Row(token_ids=tuple(prompt), start=0, block_table=source, sample=GREEDY)
    (token_id,) = drawn(backend.run([first]))
    assert token_id is not None

    def continued(where: TorchBackend, table: tuple[int, ...]) -> list[int | None]:
        return drawn(where.run([Row(token_ids=(token_id,), start=len(prompt), block_table=table, sample=GREEDY)]))

    saved = backend.save_blocks(source)
    assert saved.nbytes == len(source) * backend.kv_block_bytes
    whole = drawn(
        backend.run([Row(token_ids=(*prompt, token_id), start=0, block_table=tuple(range(60, 68)), sample=GREEDY)])
    )
    for block in source:
        backend.copy_block(block, 20 + block)
    elsewhere = (45, 31, 47, 33, 50, 30, 29, 28)
    backend.load_blocks(elsewhere, saved)
    other = TorchBackend(tiny_model, CONFIG)
    assert other.kv_format == backend.kv_format
    other.load_blocks(source[4:], saved[4 * backend.kv_block_bytes :])
    other.load_blocks(source[:4], saved[: 4 * backend.kv_block_bytes])
    assert continued(backend, tuple(20 + b for b in source)) == whole
    assert continued(backend, elsewhere) == whole
    assert continued(other, source) == whole
    assert bytes(backend.save_blocks(source)) == bytes(saved), "a copy was written to, or the source moved"


def test_saved_blocks_of_another_size_are_refused(backend: TorchBackend) -> None:
    with pytest.raises(ValueError, match="blocks"):
        backend.load_blocks([1, 2], backend.save_blocks([1]))


@pytest.mark.parametrize("changes", [{"block_size_tokens": 8}, {"dtype": "bfloat16"}], ids=["block size", "dtype"])
def test_other_layouts_have_another_format(
    tiny_model: ModelFolder, backend: TorchBackend, changes: dict[str, object]
) -> None:
    other = TorchBackend(tiny_model, CONFIG.model_validate(CONFIG.model_dump() | changes))
    assert other.kv_format != backend.kv_format


def test_running_out_of_memory_is_told_by_name_and_other_errors_are_not() -> None:
    with pytest.raises(OutOfMemoryError), out_of_memory_by_name():
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(OutOfMemoryError), out_of_memory_by_name():
        bytearray(2**62)
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught, out_of_memory_by_name():
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    assert not isinstance(caught.value, OutOfMemoryError)


@pytest.mark.parametrize(
    ("token_ids", "start", "blocks"), [((), 0, (1,)), ((5,), 4, (1,)), ((1, 2, 3, 4, 5), 0, (1,)), ((5,), 0, ())]
)
def test_a_row_whose_blocks_do_not_hold_it_is_an_error(
    backend: TorchBackend, token_ids: tuple[int, ...], start: int, blocks: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="blocks"):
        backend.run([Row(token_ids=token_ids, start=start, block_table=blocks, sample=GREEDY)])
