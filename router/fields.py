"""What of OpenAI's and vLLM's APIs this server does not act on, and what becomes of each.

Owns: the tables that keep a request from being answered as if a field had been honoured, and of the paths that others
serve. Data only. Invariant: a field that would change the answer is refused by name unless its value says "as if
absent"; a field in no table and not in the models of `router/bodies.py` is unknown and refused by name.
"""

from __future__ import annotations

NOT_OFFERED: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "cache_salt": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "ebnf": (),
    "ec_transfer_params": ({},),
    "echo": (False,),
    "extra_body": ({},),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "input_embeds": (),
    "input_ids": (),
    "json_schema": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora_path": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "regex": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "stream_interval": (1,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (),
    "web_search_options": (),
}
"""Each field and the values (null beside) with which a request means the same as without it. A field that only one of
the two APIs has (`echo`, `top_logprobs`) is here for the other."""

MESSAGE_NOT_OFFERED: dict[str, tuple[object, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning": (),
    "reasoning_content": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
"""The same for a message: what clients send back of an earlier answer."""


WITHOUT_EFFECT = (
    "metadata",
    "prompt_cache_options",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "store",
    "user",
)
"""Fields that are checked for their form and change nothing: neither the answer nor who gets it when."""

PATHS_NOT_OFFERED = {
    "/v1/assistants": "assistants",
    "/v1/audio": "audio",
    "/v1/batches": "batches",
    "/v1/classify": "classification",
    "/classify": "classification",
    "/v1/conversations": "conversations",
    "/v1/embeddings": "embeddings",
    "/v1/evals": "evals",
    "/v1/files": "files",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/images": "images",
    "/v1/messages": "the Messages API",
    "/v1/moderations": "moderations",
    "/v1/pooling": "pooling",
    "/pooling": "pooling",
    "/v1/realtime": "the Realtime API",
    "/v1/rerank": "reranking",
    "/v2/rerank": "reranking",
    "/rerank": "reranking",
    "/v1/responses": "the Responses API",
    "/v1/score": "scoring",
    "/score": "scoring",
    "/v1/threads": "threads",
    "/v1/uploads": "uploads",
    "/v1/vector_stores": "vector stores",
    "/v1/videos": "videos",
}
"""Paths of others' APIs, each with what lies below it, and what is not offered there."""


def path_not_offered(path: str) -> str | None:
    """What is not offered at this path; None where it is nobody's."""
    return next(
        (what for known, what in PATHS_NOT_OFFERED.items() if path == known or path.startswith(f"{known}/")), None
    )


def is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    """Whether `value` is one of `neutral`, or null; true is not 1, and 0.0 is 0."""
    return value is None or any(_same(value, n) for n in neutral)


def _same(value: object, neutral: object) -> bool:
    if isinstance(value, bool) or isinstance(neutral, bool):
        return value is neutral
    if isinstance(value, (int, float)) and isinstance(neutral, (int, float)):
        return value == neutral
    return type(value) is type(neutral) and value == neutral
