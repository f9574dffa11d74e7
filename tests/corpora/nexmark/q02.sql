-- Bids for some auctions: a filter.
select auction, price from bid where auction % 123 = 0
