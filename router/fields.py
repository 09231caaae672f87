"""Fields of OpenAI's and vLLM's request bodies that this server does not act on, and what becomes of each.

Owns: the two tables that keep a request from being answered as if a field had been honoured. Data only. Invariant: a
field that would change the answer is refused by name unless its value says "as if absent"; a field in neither table
and not in the models of `router/openai.py` is unknown and refused by name.
"""

from __future__ import annotations

NOT_OFFERED: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
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
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
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


def is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    """Whether `value` is one of `neutral`, or null; true is not 1, and 0.0 is 0."""
    return value is None or any(_same(value, n) for n in neutral)


def _same(value: object, neutral: object) -> bool:
    if isinstance(value, bool) or isinstance(neutral, bool):
        return value is neutral
    if isinstance(value, (int, float)) and isinstance(neutral, (int, float)):
        return value == neutral
    return type(value) is type(neutral) and value == neutral
