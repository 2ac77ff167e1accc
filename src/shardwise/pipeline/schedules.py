from shardwise.pipeline.actions import Action, Op, Schedule
def placement_of(name, ranks, chunks): return tuple(s % ranks for s in range(ranks*chunks))
def make_schedule(name, ranks, mb, chunks=1):
    S=ranks*chunks; place=placement_of(name,ranks,chunks); acts=[[] for _ in range(ranks)]
    def f(s,m):
        r=place[s]
        if s and place[s-1]!=r: acts[r].append(Action(Op.RECV_FORWARD,s,m))
        acts[r].append(Action(Op.FORWARD,s,m))
        if s<S-1 and place[s+1]!=r: acts[r].append(Action(Op.SEND_FORWARD,s,m))
    def b(s,m,op=Op.BACKWARD):
        r=place[s]
        if op is Op.BACKWARD_WEIGHT: acts[r].append(Action(op,s,m)); return
        if s<S-1 and place[s+1]!=r: acts[r].append(Action(Op.RECV_BACKWARD,s,m))
        acts[r].append(Action(op,s,m))
        if s and place[s-1]!=r: acts[r].append(Action(Op.SEND_BACKWARD,s,m))
    if name in("gpipe","inference","split","interleaved"):
        for s in range(S):
            for m in range(mb): f(s,m)
        if name!="inference":
            for s in reversed(range(S)):
                for m in range(mb): b(s,m,Op.BACKWARD_INPUT if name=="split" else Op.BACKWARD)
            if name=="split":
                for s in reversed(range(S)):
                    for m in range(mb): b(s,m,Op.BACKWARD_WEIGHT)
    else:
        for s in range(S):
            w=min(S-s-1,mb)
            for m in range(w): f(s,m)
            for m in range(mb):
                if m+w<mb: f(s,m+w)
                b(s,m)
    return Schedule(name,ranks,S,mb,place,tuple(map(tuple,acts)))
