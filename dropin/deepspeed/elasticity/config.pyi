from shardwise.config.schema.elasticity import Elasticity as ElasticityConfig
from shardwise.errors import ElasticConfigError as ElasticityConfigError
from shardwise.errors import ElasticBatchError as ElasticityError
from shardwise.errors import ElasticWorldSizeError as ElasticityIncompatibleWorldSize

__all__ = ["ElasticityConfig", "ElasticityConfigError", "ElasticityError", "ElasticityIncompatibleWorldSize"]
