from deepspeed.datastates import config as config

__all__ = ["config"]
