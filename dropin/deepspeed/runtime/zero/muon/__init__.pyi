from deepspeed.runtime.zero.muon import muon_optimizer as muon_optimizer
from deepspeed.runtime.zero.muon import original_muon as original_muon

__all__ = ["muon_optimizer", "original_muon"]
