from shardwise.comm.setup import init_distributed as init_distributed

__all__ = ["init_distributed"]
