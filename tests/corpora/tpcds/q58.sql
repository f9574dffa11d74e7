-- Items with similar sales in three channels in one week: a scalar subquery within IN.
with days as (
  select d_date
  from date_dim
  where d_week_seq = (select w.d_week_seq from date_dim as w where w.d_date = date '2000-01-03')
),
stores as (
  select i_item_id as item_id, sum(ss_ext_sales_price) as rev
  from store_sales
  join item on i_item_sk = ss_item_sk
  join date_dim on d_date_sk = ss_sold_date_sk
  where d_date in (select d_date from days)
  group by i_item_id
),
catalog as (
  select i_item_id as item_id, sum(cs_ext_sales_price) as rev
  from catalog_sales
  join item on i_item_sk = cs_item_sk
  join date_dim on d_date_sk = cs_sold_date_sk
  where d_date in (select d_date from days)
  group by i_item_id
),
web as (
  select i_item_id as item_id, sum(ws_ext_sales_price) as rev
  from web_sales
  join item on i_item_sk = ws_item_sk
  join date_dim on d_date_sk = ws_sold_date_sk
  where d_date in (select d_date from days)
  group by i_item_id
)
select
  s.item_id,
  s.rev as ss_item_rev,
  s.rev / ((s.rev + c.rev + w.rev) / 3) * 100 as ss_dev,
  c.rev as cs_item_rev,
  c.rev / ((s.rev + c.rev + w.rev) / 3) * 100 as cs_dev,
  w.rev as ws_item_rev,
  w.rev / ((s.rev + c.rev + w.rev) / 3) * 100 as ws_dev,
  (s.rev + c.rev + w.rev) / 3 as average
from stores as s
join catalog as c on c.item_id = s.item_id
join web as w on w.item_id = s.item_id
where s.rev between 0.9 * c.rev and 1.1 * c.rev
  and s.rev between 0.9 * w.rev and 1.1 * w.rev
  and c.rev between 0.9 * s.rev and 1.1 * s.rev
  and c.rev between 0.9 * w.rev and 1.1 * w.rev
  and w.rev between 0.9 * s.rev and 1.1 * s.rev
  and w.rev between 0.9 * c.rev and 1.1 * c.rev
order by s.item_id, ss_item_rev, cs_item_rev, ws_item_rev
limit 100
