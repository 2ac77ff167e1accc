"""DeepSpeed's CIFAR tutorial: a small convolutional network, with data by the engine. Random images take CIFAR's place.

deepspeed --num_gpus 2 cifar.py --dtype bf16 --stage 2
"""

import argparse
import json
import math
import os

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

STEPS, WARMUP = 6, 4


def add_argument(given=None):
    parser = argparse.ArgumentParser(description="CIFAR")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--dtype", default="fp16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--stage", default=0, type=int, choices=[0, 1, 2, 3])
    parser.add_argument("--moe-param-group", default=False, action="store_true")
    parser.add_argument("--plain", action="store_true", help="DistributedDataParallel instead of DeepSpeed")
    return deepspeed.add_config_arguments(parser).parse_args(given)


def get_ds_config(args):
    return {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": WARMUP},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {
            "enabled": args.dtype == "fp16",
            "fp16_master_weights_and_grads": False,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 15,
        },
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": args.stage,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "cpu_offload": False,
        },
    }


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    given = torch.rand(count, 3, 32, 32, generator=generator) * 2 - 1
    return torch.utils.data.TensorDataset(given, given.mean((2, 3)).argmax(1))


def main(given=None):
    args = add_argument(given)
    torch.manual_seed(0)
    deepspeed.init_distributed()
    if torch.distributed.get_rank() != 0:
        torch.distributed.barrier()
    trainset, testset = images(STEPS * 16, 1), images(32, 2)
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()
    net = Net()
    if args.plain:
        return plain(args, net, trainset, testset)

    parameters = filter(lambda p: p.requires_grad, net.parameters())
    if args.moe_param_group:
        parameters = split_params_into_different_moe_groups_for_optimizer(
            {"params": list(net.parameters()), "name": "parameters"}
        )
    model_engine, _, trainloader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=trainset, config=get_ds_config(args)
    )
    local_device = get_accelerator().device_name(model_engine.local_rank)
    target_dtype = None
    if model_engine.bfloat16_enabled():
        target_dtype = torch.bfloat16
    elif model_engine.fp16_enabled():
        target_dtype = torch.half
    criterion = nn.CrossEntropyLoss()
    losses = []
    for data in trainloader:
        inputs, labels = data[0].to(local_device), data[1].to(local_device)
        if target_dtype is not None:
            inputs = inputs.to(target_dtype)
        loss = criterion(model_engine(inputs), labels)
        model_engine.backward(loss)
        model_engine.step()
        losses.append(loss.item())
    model_engine.eval()
    held_out = []
    with torch.no_grad():
        for inputs, labels in torch.utils.data.DataLoader(testset, batch_size=4):
            outputs = model_engine(inputs.to(target_dtype or torch.float32).to(local_device))
            held_out.append(criterion(outputs, labels.to(local_device)).item())
    return {"losses": losses, "evaluation": sum(held_out) / len(held_out)}


def plain(args, net, trainset, testset):
    net = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.001, betas=(0.8, 0.999), eps=1e-8, weight_decay=3e-7)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, math.log(step + 1) / math.log(WARMUP)))
    sampler = torch.utils.data.DistributedSampler(trainset)
    losses = []
    for inputs, labels in torch.utils.data.DataLoader(trainset, 8, sampler=sampler):
        with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bf16"):
            loss = F.cross_entropy(net(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bf16"):
        held_out = F.cross_entropy(net.module(testset.tensors[0]).float(), testset.tensors[1]).item()
    return {"losses": losses, "evaluation": held_out}


if __name__ == "__main__":
    found = main()
    if os.environ["RANK"] == "0":
        print("told", json.dumps(found))
