"""`import deepspeed` gives shardwise: DeepSpeed's module paths and names, mapped to this library.

`table` maps every name, `modules` creates modules of it on import, `install` registers them in one process. `adapters`
has the objects with a different interface. The distribution in the directory `dropin/` only calls `become_root`.
"""

from shardwise.dropin.install import become_root, install_as_deepspeed
from shardwise.dropin.version import VERSION

__all__ = ["VERSION", "become_root", "install_as_deepspeed"]
