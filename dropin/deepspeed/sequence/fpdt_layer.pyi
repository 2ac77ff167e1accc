from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["FPDT_Attention", "FPDT_FFN", "FPDT_InputConstruct", "FPDT_LogitsLoss", "SequenceChunk", "_FPDTGPUOffloadingAttentionImpl_", "apply_rotary_pos_emb_backward", "bias_gelu", "bias_gelu_back", "update_out_and_lse"]

@deprecated("FPDT, which keeps attention's chunks on the host, is not built yet (shardwise.offload_activations joins)")
class FPDT_Attention:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
FPDT_FFN: object
@deprecated("FPDT, which keeps attention's chunks on the host, is not built yet (shardwise.offload_activations joins)")
class FPDT_InputConstruct:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("FPDT, which keeps attention's chunks on the host, is not built yet (shardwise.offload_activations joins)")
class FPDT_LogitsLoss:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("FPDT, which keeps attention's chunks on the host, is not built yet (shardwise.offload_activations joins)")
class SequenceChunk:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("FPDT, which keeps attention's chunks on the host, is not built yet (shardwise.offload_activations joins)")
class _FPDTGPUOffloadingAttentionImpl_:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("FPDT, which keeps attention's chunks on the host, is not built yet (shardwise.offload_activations joins)")
def apply_rotary_pos_emb_backward(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("FPDT, which keeps attention's chunks on the host, is not built yet (shardwise.offload_activations joins)")
def bias_gelu(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("FPDT, which keeps attention's chunks on the host, is not built yet (shardwise.offload_activations joins)")
def bias_gelu_back(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("FPDT, which keeps attention's chunks on the host, is not built yet (shardwise.offload_activations joins)")
def update_out_and_lse(*args: Any, **kwargs: Any) -> NoReturn: ...
