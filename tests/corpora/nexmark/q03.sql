-- Who sells what in three states: a join with filters on both sides.
select p.name, p.city, p.state, a.id
from auction as a
join person as p on p.id = a.seller
where a.category = 10 and p.state in ('OR', 'ID', 'CA')
