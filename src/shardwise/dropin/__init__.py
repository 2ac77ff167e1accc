"""`import deepspeed` gives shardwise: DeepSpeed's module paths and names, mapped to this library.

`table` maps every name, `modules` creates modules of it on import, `install` registers them as the package `deepspeed`
of one process. `adapters` has the objects whose interface differs. The distribution in the directory `dropin/` of the
repository only calls `become_root`.
"""

from shardwise.dropin.install import become_root, install_as_deepspeed
from shardwise.dropin.version import VERSION

__all__ = ["VERSION", "become_root", "install_as_deepspeed"]
