"""Every field of the requests of vLLM 0.33, SGLang 0.5.23, TEI 1.8 and TRL 0.24, and what this server does with it.

The names stand in the peers' own sources: vLLM's pydantic models in `vllm/entrypoints` and its `SamplingParams`,
SGLang's `srt/entrypoints/openai/protocol.py`, `srt/managers/io_struct.py` and `SamplingParams`, TEI's
`router/src/http/types.rs`, TRL's `scripts/vllm_serve.py`.
"""

from dataclasses import dataclass, field

from guerdon.wire.forms import (
    label_probs,
    rerank,
    sglang_logprobs,
    tei,
    tokens,
    trl_logprobs,
    vllm_logprobs,
    vllm_pooling,
)
from guerdon.wire.forms.form import Keys

NOBODY = "it names a user, a session or a cache, and changes no number"
NO_MEDIA = "it is about images, which are refused"
ONE_GREEDY_TOKEN = "at most one token follows, the likeliest: how one would be drawn or ended changes no number"
TEXT_ONLY = "it changes how the text of that token is written"
INNER = "servers of the peer's own cluster send it to each other"
REPLY_ID = "the answer of this form has no id"


@dataclass(frozen=True)
class Request:
    """One request of a peer: fields that are honoured, fields that are refused, and why others may be ignored."""

    peer: str
    kind: type[Keys]
    honoured: str
    refused: str = ""
    harmless: dict[str, str] = field(default_factory=dict)


_VLLM = "model truncate_prompt_tokens padding truncation_side priority use_activation"
_VLLM_MEDIA = "mm_processor_kwargs media_io_kwargs"
_CHAT = "chat_template chat_template_kwargs add_generation_prompt continue_final_message"
_VLLM_NOBODY = {NOBODY: "user cache_salt"}
_SGLANG_MEDIA = "input_embeds image_data video_data audio_data"
_SGLANG_INNER = "http_worker_ipc external_trace_header received_time routing_key background log_metrics"
_SAMPLING = "presence_penalty frequency_penalty top_p top_k min_p seed stop stop_token_ids ignore_eos"
_VLLM_TEXT = "skip_special_tokens spaces_between_special_tokens include_stop_str_in_output"

REQUESTS = [
    Request(
        "vLLM's TokenizeCompletionRequest and TokenizeChatRequest",
        tokens.TokenizeBody,
        "model prompt messages add_special_tokens return_token_strs add_generation_prompt continue_final_message",
        "chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs tools",
    ),
    Request("vLLM's DetokenizeRequest", tokens.DetokenizeBody, "model tokens"),
    Request("TEI's TokenizeRequest", tokens.TEITokenizeBody, "inputs add_special_tokens", "prompt_name"),
    Request(
        "vLLM's ClassificationRequest",
        vllm_pooling.ClassifyBody,
        f"{_VLLM} request_id input messages add_special_tokens",
        f"{_VLLM_MEDIA} {_CHAT} normalize",
        _VLLM_NOBODY,
    ),
    Request(
        "vLLM's PoolingRequest",
        vllm_pooling.PoolingBody,
        f"{_VLLM} request_id input messages add_special_tokens task encoding_format embed_dtype endianness",
        f"{_VLLM_MEDIA} {_CHAT} normalize dimensions data",
        _VLLM_NOBODY,
    ),
    Request(
        "vLLM's ScoreRequest",
        vllm_pooling.PairsBody,
        f"{_VLLM} request_id data_1 data_2 queries documents items text_1 text_2",
        "mm_processor_kwargs max_tokens_per_query max_tokens_per_doc instruction chat_template_kwargs",
        _VLLM_NOBODY,
    ),
    Request(
        "vLLM's EmbeddingRequest",
        vllm_pooling.EmbeddingsBody,
        f"{_VLLM} input add_special_tokens encoding_format embed_dtype endianness",
        f"{_VLLM_MEDIA} messages normalize dimensions",
        _VLLM_NOBODY | {REPLY_ID: "request_id", "it counts only with messages, which are refused": _CHAT},
    ),
    Request(
        "vLLM's GenerativeScoringRequest",
        label_probs.GenerativeScoringBody,
        "model query items label_token_ids apply_softmax item_first add_special_tokens priority request_id",
        harmless={NOBODY: "cache_salt"},
    ),
    Request(
        "vLLM's CompletionRequest",
        vllm_logprobs.CompletionsBody,
        "model prompt echo logprobs max_tokens n temperature prompt_logprobs add_special_tokens priority request_id "
        "return_tokens_as_token_ids return_token_ids",
        "stream suffix use_beam_search logit_bias allowed_token_ids prompt_embeds truncate_prompt_tokens bad_words "
        "logprob_token_ids structured_outputs response_format repetition_penalty min_tokens watermarking vllm_xargs "
        "return_weight_versions",
        {
            NOBODY: "user session_id cache_salt",
            ONE_GREEDY_TOKEN: f"{_SAMPLING} length_penalty repetition_detection thinking_token_budget",
            TEXT_ONLY: _VLLM_TEXT,
            INNER: "kv_transfer_params ec_transfer_params routed_experts_prompt_start",
            "it counts only with another key, which is refused": "truncation_side stream_options stream_interval",
            "it counts only on vLLM's render endpoints": "return_token_offsets mm_payload return_mm_kwargs",
        },
    ),
    Request(
        "vLLM's GenerateRequest",
        vllm_logprobs.GenerateBody,
        "model request_id token_ids sampling_params return_token_ids output_mode priority",
        "features content_parts stream",
        {
            NOBODY: "cache_salt",
            "it is about text, of which this form has none": "token_offsets parse_context",
            "it is about thinking, which no teacher does": "reasoning_ended reasoning_parser_kwargs",
            INNER: "kv_transfer_params ec_transfer_params",
            "it counts only with stream, which is refused": "stream_options",
        },
    ),
    Request(
        "vLLM's SamplingParams",
        vllm_logprobs.SamplingParams,
        "max_tokens prompt_logprobs prompt_logprob_token_ids prompt_logprob_start logprobs temperature n detokenize",
        "logprob_token_ids logit_bias allowed_token_ids repetition_penalty min_tokens bad_words structured_outputs "
        "watermarking trace_decode_token_ids extra_args",
        {
            ONE_GREEDY_TOKEN: f"{_SAMPLING} repetition_detection thinking_token_budget stream_interval",
            TEXT_ONLY: f"{_VLLM_TEXT} output_kind output_text_buffer_length",
            "it is about vLLM's memory": "flat_logprobs skip_clone skip_reading_prefix_cache "
            "routed_experts_prompt_start",
        },
    ),
    Request(
        "SGLang's EmbeddingReqInput",
        vllm_pooling.NativeBody,
        "rid text input_ids priority",
        f"{_SGLANG_MEDIA} embed_override_token_id embed_overrides positional_embed_overrides is_cross_encoder_request "
        "lora_path lora_id dimensions return_pooled_hidden_states return_prompt_token_ids token_indices_to_pool "
        "multi_item_delimiter_indices",
        {NO_MEDIA: "modalities", INNER: _SGLANG_INNER, "SGLang ignores it, too": "sampling_params"},
    ),
    Request(
        "SGLang's EmbeddingRequest",
        vllm_pooling.EmbeddingsBody,
        "input model encoding_format priority",
        "dimensions lora_path embed_override_token_id embed_overrides",
        {NOBODY: "user", REPLY_ID: "rid"},
    ),
    Request(
        "SGLang's ScoringRequest",
        label_probs.SGLangScoreBody,
        "query items label_token_ids apply_softmax temperature item_first model",
        "embed_override_token_id query_embed_overrides item_embed_overrides return_token_logprobs "
        "return_pooled_hidden_states score_extraction_token",
    ),
    Request(
        "SGLang's GenerateReqInput",
        sglang_logprobs.SGLangGenerateBody,
        "rid text input_ids sampling_params return_logprob logprob_start_len top_logprobs_num token_ids_logprob "
        "return_text_in_logprobs return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64 priority",
        f"{_SGLANG_MEDIA} watermark return_sampling_mask sampling_logprobs_mode return_flat_raw_output_top_logprobs "
        "stream return_hidden_states return_routed_experts return_indexer_topk session_params lora_path lora_id "
        "custom_logit_processor positional_embed_overrides return_bytes return_entropy return_prompt_token_ids "
        "mm_processor_kwargs multi_item_delimiter_indices token_indices_to_pool",
        {
            NOBODY: "session_id conversation_id extra_key no_logs custom_labels",
            NO_MEDIA: "mm_hashes mm_content_hashes use_audio_in_video video_config modalities max_dynamic_patch "
            "min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch images_config",
            INNER: f"{_SGLANG_INNER} bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size "
            "routed_dp_rank data_parallel_rank disagg_prefill_dp_rank need_wait_for_mm_inputs num_items_assigned "
            "encoder_urls",
            "it is about thinking, which no teacher does": "require_reasoning max_thinking_tokens",
            "it counts only with another key, which is refused": "routed_experts_start_len",
        },
    ),
    Request(
        "SGLang's SamplingParams",
        sglang_logprobs.Sampling,
        "max_new_tokens temperature n",
        "beam_width repetition_penalty min_new_tokens logit_bias json_schema regex ebnf structural_tag custom_params "
        "watermark",
        {
            ONE_GREEDY_TOKEN: "stop stop_token_ids stop_regex top_p top_k min_p frequency_penalty presence_penalty "
            "ignore_eos sampling_seed stream_interval ebnf_full_assistant",
            TEXT_ONLY: "skip_special_tokens spaces_between_special_tokens no_stop_trim",
        },
    ),
    Request(
        "vLLM's RerankRequest, Cohere's and Jina's",
        rerank.RerankBody,
        f"{_VLLM} request_id query documents top_n return_documents",
        "mm_processor_kwargs max_tokens_per_query max_tokens_per_doc max_chunks_per_doc rank_fields instruction "
        "chat_template_kwargs",
        _VLLM_NOBODY,
    ),
    Request(
        "TEI's RerankRequest", rerank.TEIRerankBody, "query texts truncate truncation_direction raw_scores return_text"
    ),
    Request("TEI's PredictRequest", tei.PredictBody, "inputs truncate truncation_direction raw_scores"),
    Request(
        "TEI's OpenAICompatRequest",
        vllm_pooling.EmbeddingsBody,
        "input model encoding_format",
        "dimensions",
        {NOBODY: "user"},
    ),
    Request(
        "TRL's SequenceLogprobsRequest",
        trl_logprobs.SequenceLogprobsBody,
        "sequences prompt_lengths top_logprobs temperature response_format",
    ),
]
