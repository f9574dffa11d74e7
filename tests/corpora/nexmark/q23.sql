-- Bids by people who also sell: a many-to-many join of all three tables.
select
  b.bidder, b.price, b.channel, b.url,
  b.extra as bid_extra,
  p.id as person_id, p.name, p.emailAddress, p.creditCard, p.city, p.state,
  p.extra as person_extra,
  a.itemName, a.description, a.initialBid, a.reserve,
  a.dateTime as auction_dateTime,
  a.expires, a.seller, a.category,
  a.extra as auction_extra
from bid as b
join person as p on p.id = b.bidder
join auction as a on a.seller = b.bidder
