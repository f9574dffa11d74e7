-- An item's returns in three channels over three weeks: IN within IN.
with days as (
  select d_date
  from date_dim
  where d_week_seq in (
    select w.d_week_seq
    from date_dim as w
    where w.d_date in (date '2000-06-30', date '2000-09-27', date '2000-11-17')
  )
),
sr as (
  select i_item_id as item_id, sum(sr_return_quantity) as qty
  from store_returns
  join item on i_item_sk = sr_item_sk
  join date_dim on d_date_sk = sr_returned_date_sk
  where d_date in (select d_date from days)
  group by i_item_id
),
cr as (
  select i_item_id as item_id, sum(cr_return_quantity) as qty
  from catalog_returns
  join item on i_item_sk = cr_item_sk
  join date_dim on d_date_sk = cr_returned_date_sk
  where d_date in (select d_date from days)
  group by i_item_id
),
wr as (
  select i_item_id as item_id, sum(wr_return_quantity) as qty
  from web_returns
  join item on i_item_sk = wr_item_sk
  join date_dim on d_date_sk = wr_returned_date_sk
  where d_date in (select d_date from days)
  group by i_item_id
)
select
  sr.item_id,
  sr.qty as sr_item_qty,
  sr.qty / (sr.qty + cr.qty + wr.qty) / 3.0 * 100 as sr_dev,
  cr.qty as cr_item_qty,
  cr.qty / (sr.qty + cr.qty + wr.qty) / 3.0 * 100 as cr_dev,
  wr.qty as wr_item_qty,
  wr.qty / (sr.qty + cr.qty + wr.qty) / 3.0 * 100 as wr_dev,
  (sr.qty + cr.qty + wr.qty) / 3.0 as average
from sr
join cr on cr.item_id = sr.item_id
join wr on wr.item_id = sr.item_id
order by sr.item_id, sr_item_qty, cr_item_qty, wr_item_qty
limit 100
