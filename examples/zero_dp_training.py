"""A script in the style of a DeepSpeed tutorial, with nothing of shardwise in it: what each ZeRO stage holds and sends.

    pip install ./dropin
    deepspeed --num_gpus=2 examples/zero_dp_training.py --stage=2
    deepspeed --num_gpus=2 examples/zero_dp_training.py --stage=3 --model_name=/path/to/saved/model

It prints the stage and the optimizer's share on every device, memory after each step, and how long which collective
took. Without `--model_name` a small BLOOM is built and reads bytes. Nothing is downloaded.
"""

import argparse
import json
import os
from pydoc_data.topics import topics

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.runtime.utils import memory_status
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig, BloomForCausalLM


class Rows(Dataset):
    """The Python language reference in rows of equal length."""

    def __init__(self, tokens, length, count):
        self.rows = torch.tensor(tokens[: length * count]).view(-1, length)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def load(model_name, length, count):
    """Return a model, the same on all ranks, and a data set for it."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    if model_name is not None:
        tokenizer = AutoTokenizer.from_pretrained(model_name, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(model_name, local_files_only=True)
        return model, Rows(tokenizer(text)["input_ids"], length, count)
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=256, hidden_size=64, n_layer=2, n_head=4))
    return model, Rows(list(text.encode()), length, count)


def main():
    """Train one epoch and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--model_name")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--comms_file", help="also write the collectives' sizes and times there, as JSON")
    args, _ = parser.parse_known_args()  # the launcher appends --local_rank

    rank = int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")

    deepspeed_config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1.5e-4}},
        "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False},
        "zero_optimization": {"stage": args.stage, "reduce_bucket_size": 5e6},
    }
    model, dataset = load(args.model_name, args.length, args.rows)
    model_engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=deepspeed_config
    )
    print(f"Device {rank} - ZeRO Stage: {model_engine.zero_optimization_stage()}", flush=True)
    state = optimizer.param_groups[0]
    print(
        f"Device {rank} - Optimizer: lr={state['lr']}; betas={state['betas']}; eps={state['eps']}; "
        f"parameter count={sum(torch.numel(p) for p in state['params']):,}",
        flush=True,
    )

    loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset, num_replicas=world_size))
    model_engine.train()
    dist.comms_logger.comms_dict = {}  # what building the engine has sent is not counted
    for batch in loader:
        input_ids, labels = batch["input_ids"].to(device), batch["labels"].to(device)
        loss = model_engine(input_ids, labels=labels).loss
        model_engine.backward(loss)
        model_engine.step()
        if rank == 0:
            print(f"Loss: {loss.item():.6f}")
            memory_status("Memory stats after training step")

    if rank == 0:
        taken = {}
        for operation, sizes in dist.comms_logger.comms_dict.items():
            if operation == "log_summary_barrier":
                continue
            for size, values in sizes.items():
                taken.setdefault(operation, {})[size] = values[1]
        spent = {operation: sum(map(sum, sizes.values())) for operation, sizes in taken.items()}
        for operation, milliseconds in sorted(spent.items()):
            print(f"Communication: {operation} {milliseconds:.1f} ms")
        if args.comms_file:
            with open(args.comms_file, "w") as file:
                json.dump(taken, file)
    dist.log_summary()


if __name__ == "__main__":
    main()
