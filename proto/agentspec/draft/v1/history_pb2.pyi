from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Block(_message.Message):
    __slots__ = ("namespace", "workflow_id", "stage", "block_path", "token_ids")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    WORKFLOW_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_PATH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    workflow_id: str
    stage: str
    block_path: str
    token_ids: bytes
    def __init__(self, namespace: _Optional[str] = ..., workflow_id: _Optional[str] = ..., stage: _Optional[str] = ..., block_path: _Optional[str] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class SharedBlocks(_message.Message):
    __slots__ = ("namespace", "origin", "sequence", "epoch", "num_tokens", "blocks")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    origin: int
    sequence: int
    epoch: int
    num_tokens: int
    blocks: bytes
    def __init__(self, namespace: _Optional[str] = ..., origin: _Optional[int] = ..., sequence: _Optional[int] = ..., epoch: _Optional[int] = ..., num_tokens: _Optional[int] = ..., blocks: _Optional[bytes] = ...) -> None: ...

class Deletion(_message.Message):
    __slots__ = ("namespace", "epoch")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    epoch: int
    def __init__(self, namespace: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class AppendBlocksRequest(_message.Message):
    __slots__ = ("model_fingerprint", "blocks", "shared_blocks")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    shared_blocks: _containers.RepeatedCompositeFieldContainer[SharedBlocks]
    def __init__(self, model_fingerprint: _Optional[str] = ..., blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ..., shared_blocks: _Optional[_Iterable[_Union[SharedBlocks, _Mapping]]] = ...) -> None: ...

class AppendBlocksResponse(_message.Message):
    __slots__ = ("num_tokens", "num_skipped")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_skipped: int
    def __init__(self, num_tokens: _Optional[int] = ..., num_skipped: _Optional[int] = ...) -> None: ...

class FollowBlocksRequest(_message.Message):
    __slots__ = ("model_fingerprint", "namespaces", "origin", "boot_id", "position", "deletions", "new_namespaces")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    DELETIONS_FIELD_NUMBER: _ClassVar[int]
    NEW_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    namespaces: _containers.RepeatedScalarFieldContainer[str]
    origin: int
    boot_id: int
    position: int
    deletions: _containers.RepeatedCompositeFieldContainer[Deletion]
    new_namespaces: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model_fingerprint: _Optional[str] = ..., namespaces: _Optional[_Iterable[str]] = ..., origin: _Optional[int] = ..., boot_id: _Optional[int] = ..., position: _Optional[int] = ..., deletions: _Optional[_Iterable[_Union[Deletion, _Mapping]]] = ..., new_namespaces: _Optional[_Iterable[str]] = ...) -> None: ...

class FollowBlocksResponse(_message.Message):
    __slots__ = ("blocks", "num_dropped_tokens", "shared_blocks", "boot_id", "position", "deletions")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    DELETIONS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    num_dropped_tokens: int
    shared_blocks: _containers.RepeatedCompositeFieldContainer[SharedBlocks]
    boot_id: int
    position: int
    deletions: _containers.RepeatedCompositeFieldContainer[Deletion]
    def __init__(self, blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ..., num_dropped_tokens: _Optional[int] = ..., shared_blocks: _Optional[_Iterable[_Union[SharedBlocks, _Mapping]]] = ..., boot_id: _Optional[int] = ..., position: _Optional[int] = ..., deletions: _Optional[_Iterable[_Union[Deletion, _Mapping]]] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ("model_fingerprint",)
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    def __init__(self, model_fingerprint: _Optional[str] = ...) -> None: ...

class BlockStats(_message.Message):
    __slots__ = ("namespace", "workflow_id", "stage", "block_path", "num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_tokens")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    WORKFLOW_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_PATH_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    workflow_id: str
    stage: str
    block_path: str
    num_steps: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_tokens: int
    def __init__(self, namespace: _Optional[str] = ..., workflow_id: _Optional[str] = ..., stage: _Optional[str] = ..., block_path: _Optional[str] = ..., num_steps: _Optional[int] = ..., num_drafts: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class ModelStats(_message.Message):
    __slots__ = ("model_fingerprint", "num_open_requests", "history_bytes", "blocks")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    num_open_requests: int
    history_bytes: int
    blocks: _containers.RepeatedCompositeFieldContainer[BlockStats]
    def __init__(self, model_fingerprint: _Optional[str] = ..., num_open_requests: _Optional[int] = ..., history_bytes: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[BlockStats, _Mapping]]] = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelStats]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelStats, _Mapping]]] = ...) -> None: ...

class ListKeysRequest(_message.Message):
    __slots__ = ("model_fingerprint", "namespace")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    namespace: str
    def __init__(self, model_fingerprint: _Optional[str] = ..., namespace: _Optional[str] = ...) -> None: ...

class HistoryKey(_message.Message):
    __slots__ = ("namespace", "stage", "num_tokens", "num_bytes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    stage: str
    num_tokens: int
    num_bytes: int
    def __init__(self, namespace: _Optional[str] = ..., stage: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class ListKeysResponse(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[HistoryKey]
    def __init__(self, keys: _Optional[_Iterable[_Union[HistoryKey, _Mapping]]] = ...) -> None: ...

class ExportHistoryRequest(_message.Message):
    __slots__ = ("model_fingerprint", "namespace", "without_inner")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_INNER_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    namespace: str
    without_inner: bool
    def __init__(self, model_fingerprint: _Optional[str] = ..., namespace: _Optional[str] = ..., without_inner: bool = ...) -> None: ...

class ExportHistoryResponse(_message.Message):
    __slots__ = ("archive_part",)
    ARCHIVE_PART_FIELD_NUMBER: _ClassVar[int]
    archive_part: bytes
    def __init__(self, archive_part: _Optional[bytes] = ...) -> None: ...

class ImportHistoryRequest(_message.Message):
    __slots__ = ("model_fingerprint", "namespace", "archive_part")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ARCHIVE_PART_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    namespace: str
    archive_part: bytes
    def __init__(self, model_fingerprint: _Optional[str] = ..., namespace: _Optional[str] = ..., archive_part: _Optional[bytes] = ...) -> None: ...

class ImportHistoryResponse(_message.Message):
    __slots__ = ("num_tokens",)
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    def __init__(self, num_tokens: _Optional[int] = ...) -> None: ...

class DeleteNamespaceRequest(_message.Message):
    __slots__ = ("model_fingerprint", "namespace")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    namespace: str
    def __init__(self, model_fingerprint: _Optional[str] = ..., namespace: _Optional[str] = ...) -> None: ...

class DeleteNamespaceResponse(_message.Message):
    __slots__ = ("num_tokens",)
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    def __init__(self, num_tokens: _Optional[int] = ...) -> None: ...
