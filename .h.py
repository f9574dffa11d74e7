from actors.testing.cluster import simulate
from actors.testing.simulation.schedule import draw
print([ (s,(r:=simulate(draw(s))).hash, r.violation[:50]) for s in (3,7051,7135)])
