"""The drop-in's version: that of the DeepSpeed release with the same names."""

VERSION = "0.19.8+shardwise"

version = __version__ = VERSION
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
git_hash = __git_hash__ = git_branch = __git_branch__ = "shardwise"
