"""Pipeline parallelism: models as stages."""
