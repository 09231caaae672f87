"""Text to token ids and back over HTTP, in vLLM's form: the ids are the model's own, and the bounds those of prompts."""

from __future__ import annotations

import json

import pytest
from transformers import PreTrainedTokenizerFast

from cluster.config import DEFAULT_CLASSES, Auth
from cluster.model import ModelFolder
from router.errors import ApiError
from router.keys import Identity
from router.limits import Limits
from router.openai import RequestParser
from router.prompts import TEXT_BYTES_PER_TOKEN
from router.tokenize import LEAST_COUNTED_TOKENS
from tests.unit.http_kit import MAX_LEN, plain_client, post, serving
from tests.unit.test_router_openai import completion
from tests.unit.test_router_template import CHATS

TEXTS = ["hello", "", " two  spaces ", "naïve façade 水 🙂", "<|im_start|>user\nhi<|im_end|>", "line\nbreak\ttab\x00"]


@pytest.fixture(scope="module")
def reference(tiny_model: ModelFolder) -> PreTrainedTokenizerFast:
    made: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(str(tiny_model.path))
    return made


async def test_tokens_of_a_text_are_transformers_own(
    tiny_model: ModelFolder, reference: PreTrainedTokenizerFast
) -> None:
    async with serving(tiny_model) as world, plain_client(world) as http:
        for text in TEXTS:
            ids = reference(text)["input_ids"]
            answer = await http.post("/tokenize", json={"model": "tiny-llama", "prompt": text})
            assert answer.json() == {"count": len(ids), "max_model_len": MAX_LEN, "tokens": ids, "token_strs": None}
            named = (await http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
            assert named["token_strs"] == reference.convert_ids_to_tokens(ids)


@pytest.mark.parametrize("opens", [True, False])
async def test_tokens_of_a_chat_are_transformers_own(
    tiny_model: ModelFolder, reference: PreTrainedTokenizerFast, opens: bool
) -> None:
    async with serving(tiny_model) as world:
        for chat in CHATS:
            ids = reference.apply_chat_template(chat, add_generation_prompt=opens, tokenize=True, return_dict=False)
            answer = await post(world, "/tokenize", {"messages": chat, "add_generation_prompt": opens})
            assert answer.json()["tokens"] == ids


async def test_count_is_what_a_completion_of_the_same_prompt_is_charged(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world, plain_client(world) as http:
        for path, prompt in (
            ("/v1/completions", {"prompt": TEXTS[3]}),
            ("/v1/chat/completions", {"messages": CHATS[1]}),
        ):
            counted = (await http.post("/tokenize", json=prompt)).json()["count"]
            answer = await http.post(path, json={"model": "tiny-llama", "max_tokens": 1} | prompt)
            assert answer.json()["usage"]["prompt_tokens"] == counted


async def test_detokenize_gives_back_what_was_tokenized(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world, plain_client(world) as http:
        for text in TEXTS:
            tokens = (await http.post("/tokenize", json={"prompt": text})).json()["tokens"]
            answer = await http.post("/detokenize", json={"model": "tiny-llama", "tokens": tokens})
            assert answer.json() == {"prompt": text}


async def test_text_is_counted_beyond_the_context_but_not_without_end(tiny_model: ModelFolder) -> None:
    bound = TEXT_BYTES_PER_TOKEN * LEAST_COUNTED_TOKENS
    async with serving(tiny_model) as world, plain_client(world) as http:
        long = "x " * MAX_LEN
        counted = await http.post("/tokenize", json={"prompt": long})
        assert counted.json()["count"] > MAX_LEN
        refused = await http.post("/v1/completions", json={"model": "tiny-llama", "prompt": long})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        endless = await http.post("/tokenize", content=json.dumps({"prompt": "x" * (bound + 1)}))
        assert (endless.status_code, endless.json()["error"]["param"]) == (400, "prompt")
        assert str(bound) in endless.json()["error"]["message"]


async def test_client_s_id_comes_back(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world:
        assert (await post(world, "/tokenize", {"prompt": "x"}, x_request_id="mine")).headers["x-request-id"] == "mine"
        own = (await post(world, "/detokenize", {"tokens": [5]})).headers["x-request-id"]
        assert own.startswith("tok-")


async def test_requests_for_tokens_count_as_requests_of_their_key(tiny_model: ModelFolder) -> None:
    limited = Identity("t", "k", limits=Limits(requests_per_s=0.001))
    async with serving(tiny_model, auth=Auth.KEYS, identify=lambda _: limited) as world:
        assert (await post(world, "/tokenize", {"prompt": "x"})).status_code == 200
        refused = await post(world, "/detokenize", {"tokens": [5]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1


@pytest.mark.parametrize("dense", ["1234567890", "水", "the water and ", "🙂", "\x00"])
@pytest.mark.parametrize("sparse", ["", "water" * 40, "ing " * 30])
def test_long_text_is_taken_exactly_where_its_tokens_fit(
    tiny_model: ModelFolder, reference: PreTrainedTokenizerFast, sparse: str, dense: str
) -> None:
    """However it is cut into pieces on the way: never refused where it fits, and where it does not always by name."""
    length = 128
    parser = RequestParser(tiny_model, length, DEFAULT_CLASSES, "standard")
    for repeats in range(1, 220, 3):
        text = sparse + dense * repeats
        tokens = len(reference(text)["input_ids"])
        readable = len(text.encode()) <= TEXT_BYTES_PER_TOKEN * length
        if tokens < length and readable:
            assert len(completion(parser, prompt=text, max_tokens=1).request.prompt_ids) == tokens
            continue
        with pytest.raises(ApiError) as refused:
            completion(parser, prompt=text, max_tokens=1)
        assert (refused.value.body.param, refused.value.body.code) == ("prompt", "context_length_exceeded")
