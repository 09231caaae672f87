"""Loads a transformers model for paged attention, or says in one line why it cannot be served.

Owns: the check that a model's attention is one that we compute (causal, full or sliding, softmax of scaled products) and
nothing more. Imports torch and transformers. Invariant: a model that passes runs every layer's attention through
`paged_attention`; what is not known to be right is refused, never served wrongly.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from cluster.config import DType
from cluster.engine.memory import stored_tensors
from cluster.engine.torch.attention import AttentionStep
from cluster.engine.torch.decoder import DTYPES
from cluster.engine.torch.hf_attention import ATTENTION_NAME, ShapeProbe, UnsupportedAttentionError
from cluster.engine.torch.packing import pack_linears
from cluster.engine.torch.paged_cache import LayerShape
from cluster.model import ModelFolder, ModelFolderError

LAYER_TYPES = {"full_attention", "sliding_attention"}
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
"""These change every position's angles once any sequence is longer than the original length; keys in the cache and
other sequences of the batch would then be wrong. Up to that length they are plain."""


class TransformersDecoder:
    """A `Decoder` around a transformers model whose attention is `paged_attention`."""

    def __init__(self, model: PreTrainedModel, shapes: list[LayerShape]) -> None:
        self._model = model
        self.shapes = shapes

    def logits(self, token_ids: Tensor, positions: Tensor, kept: Tensor, step: AttentionStep) -> Tensor:
        output = self._model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=kept, step=step
        )
        logits: Tensor = output.logits[0]
        return logits


def load_transformers_decoder(model: ModelFolder, dtype: DType, max_model_len: int) -> TransformersDecoder:
    """The model on the CPU, as from_pretrained leaves it in evaluation mode, its linear layers packed.

    Raises:
        ModelFolderError: the folder cannot be read, or the model needs something that is not supported here.
    """
    quieten_transformers()
    try:
        config = AutoConfig.from_pretrained(model.path, local_files_only=True, trust_remote_code=False)
        refuse_unsupported(model.name, config, max_model_len)
        refuse_sizes(model, config)
        loaded: PreTrainedModel
        info: dict[str, set[Any]]
        loaded, info = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]  # its stub knows one result only
            model.path,
            config=config,
            dtype=DTYPES[dtype],
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are told below, by name
            output_loading_info=True,
        )
    except ModelFolderError:
        raise
    except Exception as error:  # a setting of a wrong type or size can break transformers anywhere
        # Some architectures look attention up in a table of their own and know no other name.
        why = "its attention cannot be replaced" if ATTENTION_NAME in str(error) else _one_line(error)
        raise ModelFolderError(f"{model.path} cannot be loaded: {why}") from error
    # transformers would go on with random numbers in their place, or leave out what it has no place for.
    astray = sorted({*info["missing_keys"], *info["unexpected_keys"], *(key for key, *_ in info["mismatched_keys"])})
    if astray:
        raise ModelFolderError(
            f"{model.path}: weights and config.json do not fit together: {len(astray)} missing, too many or of another "
            f"shape, such as {astray[0]}"
        )
    loaded.requires_grad_(False)
    pack_linears(loaded)  # before the probe, which then sees a model that looks into its linear layers
    return TransformersDecoder(loaded, _probe(model.name, loaded, max_model_len))


def refuse_unsupported(name: str, config: PretrainedConfig, max_model_len: int) -> None:
    """What the configuration alone shows; the probe after loading finds the rest.

    Raises:
        ModelFolderError: names what is not supported.
    """
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    ropes = [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    original_length = next(
        (r["original_max_position_embeddings"] for r in ropes if r.get("original_max_position_embeddings")),
        text.max_position_embeddings if hasattr(text, "max_position_embeddings") else max_model_len,
    )
    other_layers = set(getattr(text, "layer_types", None) or ()) - LAYER_TYPES
    unsupported = {
        "an encoder with a decoder": bool(getattr(config, "is_encoder_decoder", False)),
        "ALiBi positions": bool(getattr(text, "alibi", False)),
        "soft-capped attention scores": getattr(text, "attn_logit_softcapping", None) is not None,
        "attention that is not causal": not getattr(text, "is_causal", True),
        "quantised weights": getattr(config, "quantization_config", None) is not None,
        f"layers of {', '.join(sorted(other_layers))}": bool(other_layers),
        f"rotary positions that change beyond {original_length} tokens (lower max_model_len to that)": any(
            r.get("rope_type") in LENGTH_DEPENDENT_ROPE for r in ropes
        )
        and max_model_len > original_length,
    }
    found = [what for what, is_so in unsupported.items() if is_so]
    if found:
        raise ModelFolderError(f"{name} ({config.model_type}) needs what is not supported here: {'; '.join(found)}")


def refuse_sizes(model: ModelFolder, config: PretrainedConfig) -> None:
    """See that the model is about as large as its weights before memory is taken for it.

    transformers would take it also for what the weights do not have, and a slip in a size be the end of the process.

    Raises:
        ModelFolderError: it is more than twice as large (tied weights are counted once or twice).
    """
    stored = [tensor.numbers for tensor in stored_tensors(model)]
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0)
    if layers > len(stored):
        raise ModelFolderError(
            f"{model.path}: config.json means {layers} layers, the weights have {len(stored)} tensors"
        )
    with torch.device("meta"):
        shell: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    numbers = sum(p.numel() for p in shell.parameters())
    if numbers > 2 * sum(stored):
        raise ModelFolderError(f"{model.path}: config.json means {numbers} numbers, the weights have {sum(stored)}")


def _probe(name: str, model: PreTrainedModel, max_model_len: int) -> list[LayerShape]:
    """Run one token and see that every layer's attention, once, came to us, with its window where it has one."""
    parameters = inspect.signature(model.forward).parameters
    missing = [p for p in ("position_ids", "logits_to_keep") if p not in parameters]
    if missing:
        raise ModelFolderError(
            f"{name} ({type(model).__name__}) does not take {' or '.join(missing)}: not supported here"
        )
    probe = ShapeProbe()
    one = torch.zeros((1, 1), dtype=torch.int64)
    try:
        with torch.inference_mode():
            model(input_ids=one, position_ids=one, use_cache=False, logits_to_keep=one[0], step=probe)
    except UnsupportedAttentionError as error:
        raise ModelFolderError(f"{name} ({type(model).__name__}) needs what is not supported here: {error}") from error
    except TypeError as error:
        raise ModelFolderError(
            f"{name} ({type(model).__name__}) does not hand the step to its attention: {_one_line(error)}"
        ) from error
    except Exception as error:  # as while it is loaded
        raise ModelFolderError(f"{name} ({type(model).__name__}) cannot run one token: {_one_line(error)}") from error
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if [layer for layer, _ in probe.seen] != list(range(layers)):
        raise ModelFolderError(
            f"{name} ({type(model).__name__}) computes attention in its own way in some of its {layers} layers: "
            "not supported here"
        )
    _check_windows(name, model, probe.windows, max_model_len)
    return [shape for _, shape in probe.seen]


def _check_windows(name: str, model: PreTrainedModel, windows: list[int | None], max_model_len: int) -> None:
    """See that each layer tells its attention (`windows`) of the window that it means.

    Some architectures put a window into the mask alone, which is not asked for here; others hand one on, from settings
    that they do not have, and do not mean it.
    """
    text = model.config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None) if kinds or hasattr(type(text), "sliding_window") else None
    meant = [window if kind == "sliding_attention" else None for kind in kinds or ["sliding_attention"] * len(windows)]
    for layer, (means, told) in enumerate(zip(meant, windows, strict=True)):
        if told is not None and told < 1:
            raise ModelFolderError(f"{name} ({type(model).__name__}) has a window of {told} in layer {layer}")
        shorter = [w for w in (means, told) if w is not None and w < max_model_len]
        if means != told and shorter:
            raise ModelFolderError(
                f"{name} ({type(model).__name__}) means a window of {means} and tells its attention {told} in layer "
                f"{layer}: lower max_model_len to {min(shorter)}"
            )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def quieten_transformers() -> None:
    """No progress bars and no advice from transformers in a server's log."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("transformers").setLevel(logging.ERROR)
