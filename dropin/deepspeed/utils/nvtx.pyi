from shardwise.utils.nvtx import instrument_w_nvtx as instrument_w_nvtx

__all__ = ["instrument_w_nvtx"]
