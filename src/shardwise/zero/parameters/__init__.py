"""Parameters in the script: sharded construction, manual unsharding, and guards against changes by the script."""
