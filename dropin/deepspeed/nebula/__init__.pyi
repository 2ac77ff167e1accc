from deepspeed.nebula import config as config

__all__ = ["config"]
