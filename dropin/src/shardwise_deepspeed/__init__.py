"""DeepSpeed's module paths and names, mapped to shardwise: `import deepspeed` gives this library.

`names.toml` maps every name, `modules` creates modules of it on import, and the other files have what has another
form in shardwise. The package `deepspeed` of this distribution only calls `become_root`.
"""

from shardwise_deepspeed.install import become_root, install_as_deepspeed
from shardwise_deepspeed.version import VERSION

__all__ = ["VERSION", "become_root", "install_as_deepspeed"]
