"""transformers' run_clm.py: a causal language model from scratch or from a checkpoint, by the Trainer.

deepspeed --num_gpus 2 clm.py --deepspeed z3.json --tokenizer_name tokenizer --train_file text.txt --output_dir out
"""

import json
import math
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain

from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.initialization import no_init_weights


@dataclass
class ModelArguments:
    model_name_or_path: str | None = None
    model_type: str | None = None
    config_overrides: str | None = None
    tokenizer_name: str | None = None
    as_at_stage_3: bool = field(default=False, metadata={"help": "draw weights in the order in which ZeRO-3 does"})


@dataclass
class DataTrainingArguments:
    train_file: str = field(default="text.txt")
    block_size: int = 16
    validation_rows: int = 6


def main(given=None):
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses(given)
    print(
        f"Process rank: {training_args.local_process_index}, device: {training_args.device}, "
        f"distributed training: {training_args.parallel_mode.value == 'distributed'}",
        file=sys.stderr,
    )
    set_seed(training_args.seed)
    if model_args.model_name_or_path:
        config = AutoConfig.from_pretrained(model_args.model_name_or_path)
    else:
        config = CONFIG_MAPPING[model_args.model_type]()
        config.update_from_string(model_args.config_overrides)
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or model_args.model_name_or_path)
    counted = {}
    if model_args.model_name_or_path:
        model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, config=config)
    else:
        with no_init_weights() if model_args.as_at_stage_3 else nullcontext():
            model = AutoModelForCausalLM.from_config(config)
        if model_args.as_at_stage_3:
            model.initialize_weights()
            model.tie_weights()
        counted["parameters"] = sum({p.data_ptr(): p.numel() for p in model.parameters()}.values())
    embedding_size = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > embedding_size:
        model.resize_token_embeddings(len(tokenizer))

    with training_args.main_process_first(desc="grouping texts together"):
        with open(data_args.train_file) as file:
            tokens = list(chain(*(tokenizer(line)["input_ids"] for line in file)))
        size = data_args.block_size
        blocks = [tokens[i : i + size] for i in range(0, len(tokens) // size * size, size)]
        rows = [{"input_ids": block, "attention_mask": [1] * size, "labels": list(block)} for block in blocks]

    def preprocess_logits_for_metrics(logits, labels):
        return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)

    def compute_metrics(predicted):
        right = predicted.predictions[:, :-1] == predicted.label_ids[:, 1:]
        return {"accuracy": float(right.mean())}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=rows[data_args.validation_rows :],
        eval_dataset=rows[: data_args.validation_rows],
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.save_metrics("eval", metrics)
    trainer.create_model_card(tasks="text-generation")
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return counted | {"losses": [float(loss) for loss in losses], "evaluation": metrics["eval_loss"]}


if __name__ == "__main__":
    found = main()
    if os.environ["RANK"] == "0":
        print("told", json.dumps(found))
