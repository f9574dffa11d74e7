-- Bids joined to a bounded side input that the query defines.
with side as (
  select id as key, concat('value-', id) as value from range(0, 10000)
)
select b.auction, b.bidder, b.price, b.dateTime, side.value
from bid as b
join side on side.key = b.auction % 10000
