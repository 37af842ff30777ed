from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "boot_id", "models", "max_message_bytes", "max_open_requests")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    version: str
    boot_id: int
    models: _containers.RepeatedCompositeFieldContainer[Model]
    max_message_bytes: int
    max_open_requests: int
    def __init__(self, version: _Optional[str] = ..., boot_id: _Optional[int] = ..., models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., max_message_bytes: _Optional[int] = ..., max_open_requests: _Optional[int] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("model_fingerprint", "vocabulary_size", "num_speculative_tokens")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    vocabulary_size: int
    num_speculative_tokens: int
    def __init__(self, model_fingerprint: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., num_speculative_tokens: _Optional[int] = ...) -> None: ...

class RegisterTokenizerRequest(_message.Message):
    __slots__ = ("model_fingerprint", "chat_template", "token_lengths", "token_bytes")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    chat_template: str
    token_lengths: bytes
    token_bytes: bytes
    def __init__(self, model_fingerprint: _Optional[str] = ..., chat_template: _Optional[str] = ..., token_lengths: _Optional[bytes] = ..., token_bytes: _Optional[bytes] = ...) -> None: ...

class RegisterTokenizerResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class RegisterGrammarRequest(_message.Message):
    __slots__ = ("model_fingerprint", "namespace", "grammar_id", "grammar_json")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_ID_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_JSON_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    namespace: str
    grammar_id: str
    grammar_json: str
    def __init__(self, model_fingerprint: _Optional[str] = ..., namespace: _Optional[str] = ..., grammar_id: _Optional[str] = ..., grammar_json: _Optional[str] = ...) -> None: ...

class RegisterGrammarResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "is_structured", "forced_tool")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    IS_STRUCTURED_FIELD_NUMBER: _ClassVar[int]
    FORCED_TOOL_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    is_structured: bool
    forced_tool: str
    def __init__(self, temperature: _Optional[float] = ..., is_structured: bool = ..., forced_tool: _Optional[str] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("handle", "namespace", "prompt_token_ids", "tags_json", "sampling")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TAGS_JSON_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    handle: int
    namespace: str
    prompt_token_ids: bytes
    tags_json: str
    sampling: Sampling
    def __init__(self, handle: _Optional[int] = ..., namespace: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., tags_json: _Optional[str] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("handle", "reason", "num_output_tokens", "tail_token_ids")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TAIL_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    reason: FinishReason
    num_output_tokens: int
    tail_token_ids: bytes
    def __init__(self, handle: _Optional[int] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., num_output_tokens: _Optional[int] = ..., tail_token_ids: _Optional[bytes] = ...) -> None: ...

class OpenRequestsRequest(_message.Message):
    __slots__ = ("model_fingerprint", "client_id", "requests")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    client_id: int
    requests: _containers.RepeatedCompositeFieldContainer[OpenRequest]
    def __init__(self, model_fingerprint: _Optional[str] = ..., client_id: _Optional[int] = ..., requests: _Optional[_Iterable[_Union[OpenRequest, _Mapping]]] = ...) -> None: ...

class OpenRequestsResponse(_message.Message):
    __slots__ = ("boot_id",)
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    def __init__(self, boot_id: _Optional[int] = ...) -> None: ...

class CloseRequestsRequest(_message.Message):
    __slots__ = ("model_fingerprint", "client_id", "requests")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    client_id: int
    requests: _containers.RepeatedCompositeFieldContainer[CloseRequest]
    def __init__(self, model_fingerprint: _Optional[str] = ..., client_id: _Optional[int] = ..., requests: _Optional[_Iterable[_Union[CloseRequest, _Mapping]]] = ...) -> None: ...

class CloseRequestsResponse(_message.Message):
    __slots__ = ("unknown_handles",)
    UNKNOWN_HANDLES_FIELD_NUMBER: _ClassVar[int]
    unknown_handles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, unknown_handles: _Optional[_Iterable[int]] = ...) -> None: ...

class StepTiming(_message.Message):
    __slots__ = ("duration_ms", "num_decode_rows", "num_draft_tokens", "num_draft_rows", "num_prefill_tokens", "num_sampled_rows", "num_context_tokens")
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLED_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    duration_ms: float
    num_decode_rows: int
    num_draft_tokens: int
    num_draft_rows: int
    num_prefill_tokens: int
    num_sampled_rows: int
    num_context_tokens: int
    def __init__(self, duration_ms: _Optional[float] = ..., num_decode_rows: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_draft_rows: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., num_sampled_rows: _Optional[int] = ..., num_context_tokens: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("step_id", "handles", "positions", "token_offsets", "token_ids", "num_draft_tokens", "num_accepted_tokens", "max_draft_tokens", "num_decode_rows", "num_prefill_tokens", "token_budget", "num_context_tokens", "timing", "traceparent")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    handles: bytes
    positions: bytes
    token_offsets: bytes
    token_ids: bytes
    num_draft_tokens: bytes
    num_accepted_tokens: bytes
    max_draft_tokens: bytes
    num_decode_rows: int
    num_prefill_tokens: int
    token_budget: int
    num_context_tokens: int
    timing: StepTiming
    traceparent: str
    def __init__(self, step_id: _Optional[int] = ..., handles: _Optional[bytes] = ..., positions: _Optional[bytes] = ..., token_offsets: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., num_draft_tokens: _Optional[bytes] = ..., num_accepted_tokens: _Optional[bytes] = ..., max_draft_tokens: _Optional[bytes] = ..., num_decode_rows: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., token_budget: _Optional[int] = ..., num_context_tokens: _Optional[int] = ..., timing: _Optional[_Union[StepTiming, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class StepDrafts(_message.Message):
    __slots__ = ("step_id", "draft_lengths", "draft_token_ids", "survival", "redundancy", "token_budget", "skip_steps", "resync_handles")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SURVIVAL_FIELD_NUMBER: _ClassVar[int]
    REDUNDANCY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    SKIP_STEPS_FIELD_NUMBER: _ClassVar[int]
    RESYNC_HANDLES_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    draft_lengths: bytes
    draft_token_ids: bytes
    survival: bytes
    redundancy: bytes
    token_budget: int
    skip_steps: int
    resync_handles: bytes
    def __init__(self, step_id: _Optional[int] = ..., draft_lengths: _Optional[bytes] = ..., draft_token_ids: _Optional[bytes] = ..., survival: _Optional[bytes] = ..., redundancy: _Optional[bytes] = ..., token_budget: _Optional[int] = ..., skip_steps: _Optional[int] = ..., resync_handles: _Optional[bytes] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("model_fingerprint", "client_id", "step")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    client_id: int
    step: Step
    def __init__(self, model_fingerprint: _Optional[str] = ..., client_id: _Optional[int] = ..., step: _Optional[_Union[Step, _Mapping]] = ...) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("boot_id", "drafts")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    drafts: StepDrafts
    def __init__(self, boot_id: _Optional[int] = ..., drafts: _Optional[_Union[StepDrafts, _Mapping]] = ...) -> None: ...

class DraftStreamRequest(_message.Message):
    __slots__ = ("model_fingerprint", "closes", "opens", "step")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    closes: _containers.RepeatedCompositeFieldContainer[CloseRequest]
    opens: _containers.RepeatedCompositeFieldContainer[OpenRequest]
    step: Step
    def __init__(self, model_fingerprint: _Optional[str] = ..., closes: _Optional[_Iterable[_Union[CloseRequest, _Mapping]]] = ..., opens: _Optional[_Iterable[_Union[OpenRequest, _Mapping]]] = ..., step: _Optional[_Union[Step, _Mapping]] = ...) -> None: ...

class DraftStreamResponse(_message.Message):
    __slots__ = ("boot_id", "client_id", "drafts", "error")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    client_id: int
    drafts: StepDrafts
    error: StreamError
    def __init__(self, boot_id: _Optional[int] = ..., client_id: _Optional[int] = ..., drafts: _Optional[_Union[StepDrafts, _Mapping]] = ..., error: _Optional[_Union[StreamError, _Mapping]] = ...) -> None: ...

class StreamError(_message.Message):
    __slots__ = ("step_id", "code", "field", "message")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    code: int
    field: str
    message: str
    def __init__(self, step_id: _Optional[int] = ..., code: _Optional[int] = ..., field: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
