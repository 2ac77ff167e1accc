"""`import deepspeed` gives shardwise: DeepSpeed's module paths and names, served by what they stand for here.

`table` says which name is what, `modules` makes modules of it when they are imported, `install` puts them in the place
of the package `deepspeed` for one process, and `adapters` has the few objects whose form differs. The distribution in
the directory `dropin/` of the repository does nothing but call `become_root`.
"""

from shardwise.dropin.install import become_root, install_as_deepspeed
from shardwise.dropin.version import VERSION

__all__ = ["VERSION", "become_root", "install_as_deepspeed"]
