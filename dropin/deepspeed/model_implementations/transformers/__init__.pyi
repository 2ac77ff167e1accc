from deepspeed.model_implementations.transformers import ds_bloom as ds_bloom
from deepspeed.model_implementations.transformers import ds_gpt as ds_gpt
from deepspeed.model_implementations.transformers import ds_llama2 as ds_llama2
from deepspeed.model_implementations.transformers import ds_opt as ds_opt
from deepspeed.model_implementations.transformers import ds_transformer as ds_transformer

__all__ = ["ds_bloom", "ds_gpt", "ds_llama2", "ds_opt", "ds_transformer"]
