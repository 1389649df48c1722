import itertools, sys
sys.path.insert(0,"benchmarks")
import torch, triton, qmargin
from head_stages import median_ms, make_batch
from qmargin.heads.classifier import MarginClassifier
from qmargin.heads.sparse import SparseStep
from qmargin.kernels.triton import rescore as RS, gradients as GR, update as UP
from qmargin.kernels.head_reference import GROUP
torch.manual_seed(0)
k,d,B=2_059_906,512,1024
for S in (35.0,20.0):
    head=MarginClassifier(d,k,qmargin.q_margin(scale=S),device="cuda",gradient="fused",screen_dtype=torch.float16)
    e,y=make_batch(head,B); head.refresh(); K=head.kernels
    u=torch.nn.functional.normalize(e); W=head.prototypes.detach(); inv=head.inverse_norms
    prep=K.prepare_rows(u,y,W,inv,torch.float16); step=SparseStep(head,prep,y)
    term=head.loss.margin(prep.target_cosines.double(),S,labels=y)
    maxima=K.group_maxima(prep.rounded,head.copy,y,k); slack=step.slack()
    o=dict(scale=S,order=.25)
    pairs=K.list_pairs(maxima,term.logits,term.log_reference,slack,**o)
    ng=-(-k//GROUP); groups=pairs.groups
    ordered,order=groups.sort(stable=True); bounds=torch.arange(ng+1,dtype=torch.int32,device="cuda")
    seg=torch.searchsorted(ordered,bounds,out_int32=True)
    print("S",S,"pairs/row",len(groups)/B, "sort",median_ms(lambda:groups.sort(stable=True)),"searchsorted",median_ms(lambda:torch.searchsorted(ordered,bounds,out_int32=True)))
    masks=torch.empty_like(groups)
    res=[]
    for BR,BK,w,st in itertools.product([16,32,64],[128,256,512],[1,2,4],[1,2,3]):
        f=lambda: RS._filter[(ng,)](prep.rounded,head.copy,y,pairs.floor,slack,pairs.rows,order,seg,masks,k,d,GROUP,BR,BK,num_warps=w,num_stages=st)
        try: res.append((median_ms(f,4,1),BR,BK,w,st))
        except Exception as ex: pass
    print("filter (ms,BR,BK,warps,stages)",[tuple(round(v,3) for v in r) for r in sorted(res)[:8]],flush=True)
    c=K.score_candidates(prep,head.copy,W,inv,y,pairs)
    res=[]
    for sp,bl,w in itertools.product([4,8,16,32],[4,8,16],[1,2,4]):
        f=lambda: RS._score[(B,sp)](c.columns,c.starts,u,W,inv,c.scores,d,sp,512,bl,num_warps=w)
        res.append((median_ms(f,4,1),sp,bl,w))
    print("score (ms,split,block,warps)",[tuple(round(v,3) for v in r) for r in sorted(res)[:5]],flush=True)
    sol=K.solve_lists(c,term.logits,term.log_reference,**o)
    wt=torch.ones(B,device="cuda"); res=[]
    for sp,bl,w in itertools.product([4,8,16,32],[4,8,16],[1,2,4]):
        parts=torch.empty((sp,B,d),device="cuda")
        f=lambda: GR._embedding_gradient[(B,sp)](sol.columns,sol.posterior,sol.starts,y,W,inv,wt,wt,parts,B,d,sp,512,bl,num_warps=w)
        res.append((median_ms(f,4,1),sp,bl,w))
    print("gx (ms,split,block,warps)",[tuple(round(v,3) for v in r) for r in sorted(res)[:5]],flush=True)
    cg=K.sort_by_class(sol,y,wt,wt)
    V=torch.zeros_like(W); one=torch.ones((),device="cuda"); res=[]
    progs=-(-k//16); edges=torch.arange(progs+1,dtype=torch.int32,device="cuda")*16; sg=torch.searchsorted(cg.columns,edges,out_int32=True); lg=torch.zeros((),device="cuda")
    for only,w,blk in itertools.product((False,True),(2,4,8),(16,32)):
        f=lambda: UP._sgd[(progs,)](cg.columns,cg.rows,cg.values,sg,u,W,V,inv,head.copy,one,lg,0.0,.9,5e-4,k,d,True,False,only,16,512,blk,num_warps=w)
        try: res.append((only,median_ms(f,4,1),w,blk))
        except Exception as ex: pass
    print("sgd (only_active,ms,warps,block)",[tuple(round(v,3) for v in r) for r in sorted(res)],flush=True)
    del head,W,V,maxima; torch.cuda.empty_cache()
