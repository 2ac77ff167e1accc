import torch
from torch import nn
class PipelineModule(nn.Module):
    def __init__(self, layers, num_stages=None, loss_fn=None):
        super().__init__(); self.specs=layers; self.num_stages=num_stages; self.loss_fn=loss_fn; self.layers=nn.ModuleDict()
    def build(self, stages, count):
        n=len(self.specs); self.bounds=[n*i//count for i in range(count+1)]
        for s in stages:
            for i in range(self.bounds[s],self.bounds[s+1]):
                torch.manual_seed(1000+i); self.layers[str(i)]=self.specs[i]()
    def layers_of(self, stage): return f"layers {self.bounds[stage]}-{self.bounds[stage+1]-1}"
    def forward(self, value, stage=None):
        r=range(self.bounds[stage],self.bounds[stage+1]) if stage is not None else range(len(self.specs))
        for i in r: value=self.layers[str(i)](value)
        return value
