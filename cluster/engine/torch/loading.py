"""Chooses the decoder for a model folder.

Owns: which decoder a model gets. Imports transformers only for a model that needs it, since that import is half of a
replica's start. Invariant: whichever decoder it is, a model that it would compute wrongly is refused; the refusal is
always transformers' decoder's, for whatever our own does not know in full goes there.
"""

from __future__ import annotations

import logging

from safetensors import SafetensorError

from cluster.config import DType
from cluster.engine.torch.decoder import DTYPES, Decoder
from cluster.engine.torch.llama import read_spec, tensor_shapes
from cluster.engine.torch.weights import open_weights
from cluster.model import ModelFolder

log = logging.getLogger(__name__)


def load_decoder(model: ModelFolder, dtype: DType, max_model_len: int) -> Decoder:
    """The fastest decoder that knows the model.

    Raises:
        ModelFolderError: the folder cannot be read, or the model needs something that is not supported here.
    """
    return load_lean(model, dtype, max_model_len) or load_with_transformers(model, dtype, max_model_len)


def load_lean(model: ModelFolder, dtype: DType, max_model_len: int) -> Decoder | None:
    """Our own decoder, or None where config.json, a weight file or the tensors in them are not known to be right."""
    spec = read_spec(model)
    if spec is None:
        return None
    from cluster.engine.torch.cpu.decoder import CpuDecoder, can_decode, read_model

    if not can_decode(spec, DTYPES[dtype]):
        return None
    try:
        with open_weights(model, DTYPES[dtype]) as weights:
            if not weights.have_exactly(tensor_shapes(spec)):
                return None
            return CpuDecoder(spec, read_model(spec, weights), DTYPES[dtype], max_model_len)
    except (SafetensorError, OSError) as error:
        log.warning("%s cannot be read: %s", model.path, error)
        return None


def load_with_transformers(model: ModelFolder, dtype: DType, max_model_len: int) -> Decoder:
    """transformers' model behind our attention. Raises ModelFolderError."""
    from cluster.engine.torch.hf_decoder import load_transformers_decoder

    return load_transformers_decoder(model, dtype, max_model_len)
