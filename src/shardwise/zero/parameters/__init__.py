"""Parameters as scripts meet them: made sharded, gathered by hand, and guarded against what scripts do to them."""
