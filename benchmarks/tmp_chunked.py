import sys; sys.path.insert(0,"benchmarks")
import torch, qmargin
from head_stages import median_ms, make_batch
from qmargin.heads.classifier import MarginClassifier
from qmargin.heads.updates import ExactSGD, SparseSGD
torch.manual_seed(0)
k,d,B=2_059_906,512,1024
a=torch.randn(B,d,device="cuda",dtype=torch.float16); b=torch.randn(-(-k//256)*256,d,device="cuda",dtype=torch.float16)
gemm=median_ms(lambda:a@b.t()); print("gemm",gemm); del a,b
def run(path,loss,gradient,opt=None):
    torch.cuda.empty_cache()
    head=MarginClassifier(d,k,loss,device="cuda",gradient=gradient,path=path)
    e,y=make_batch(head,B); e.requires_grad_()
    o=opt(head,lr=0.1) if opt else None
    def step():
        e.grad=None; head.prototypes.grad=None
        if o is None: head.pending=None
        head(e,y).backward()
        if o: o.step(); o.zero_grad()
    step(); step(); torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats(); base=torch.cuda.memory_allocated()
    step(); torch.cuda.synchronize(); peak=(torch.cuda.max_memory_allocated()-base)/2**30
    t=median_ms(step,6,1); print(path,type(loss.margin).__name__,loss.alpha_value,loss.scale,gradient,opt.__name__ if opt else "-",f"{t:.2f} ms ratio {t/gemm:.2f} peak {peak:.2f} GiB",head.last_step,flush=True)
    del head,e,y,o
for args in [("chunked",qmargin.arcface(),"dense"),("chunked",qmargin.cosface(),"fused"),("chunked",qmargin.arcface(),"fused",ExactSGD),("sparse",qmargin.q_margin_face(),"fused"),("sparse",qmargin.q_margin_face(),"fused",SparseSGD),("sparse",qmargin.q_margin_face(),"fused",ExactSGD),("sparse",qmargin.q_margin(scale=10.),"fused"),("chunked",qmargin.q_margin(scale=10.),"fused"),("sparse",qmargin.q_margin_face(),"dense")]:
    try: run(*args)
    except Exception as ex: print(args[0],args[2:],"failed",repr(ex)[:300])
