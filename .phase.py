import time, asyncio
from collections import Counter
from actors.testing.cluster import simulate, World
from actors.testing.simulation import run, rest
from actors.testing.simulation.schedule import draw
from actors.testing.simulation.faults import Trace
marks={}
o=Trace.note
def note(self,*w):
    if w and w[0]=="calm": marks['calm']=(time.process_time(), asyncio.get_running_loop().time(), asyncio.get_running_loop().turns)
    o(self,*w)
Trace.note=note
o2=run._nothing_left
async def nl(world, worker):
    marks['drop']=(time.process_time(), asyncio.get_running_loop().time(), asyncio.get_running_loop().turns)
    await o2(world,worker)
run._nothing_left=nl
o3=run.check_rest
async def cr(w):
    marks['rest']=(time.process_time(), asyncio.get_running_loop().time(), asyncio.get_running_loop().turns)
    await o3(w)
    marks['restend']=(time.process_time(), asyncio.get_running_loop().time(), asyncio.get_running_loop().turns)
run.check_rest=cr
for s in range(3): simulate(draw(s))
tot=Counter(); vt=Counter(); tt=Counter(); N=20
for s in range(100,100+N):
    marks.clear(); t0=time.process_time(); simulate(draw(s)); t1=time.process_time()
    seq=[('start',(t0,0,0))]+[(k,marks[k]) for k in ('calm','drop','rest','restend') if k in marks]
    for (a,x),(b,y) in zip(seq,seq[1:]): tot[a]+=y[0]-x[0]; vt[a]+=y[1]-x[1]; tt[a]+=y[2]-x[2]
    tot['end']+=t1-seq[-1][1][0]
for k in tot: print(k, round(1000*tot[k]/N,1),'ms', round(vt[k]/N,2),'virtual s', tt[k]/N,'turns')
print(sum(tot.values())/N*1000)
