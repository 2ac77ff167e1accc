"""TRL's sft.py with --use_peft: supervised fine-tuning of adapters (LoRA).

accelerate launch --config_file zero2.yaml sft.py --model_name_or_path model --use_peft --lora_target_modules c_attn
"""

import json
import os
import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config


def main(given=None):
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config(given)
    set_seed(training_args.seed)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    with open(script_args.dataset_name) as file:
        lines = [line.strip() for line in file]
    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=Dataset.from_list([{"text": line} for line in lines[6:]]),
        eval_dataset=Dataset.from_list([{"text": line} for line in lines[:6]]),
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    history = trainer.state.log_history
    losses = [float(row["loss"]) for row in history if "loss" in row]
    return {"losses": losses, "evaluation": trainer.evaluate()["eval_loss"]}


if __name__ == "__main__":
    found = main(sys.argv[1:])
    if os.environ["RANK"] == "0":
        print("told", json.dumps(found))
