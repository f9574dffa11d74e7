-- Excess discounts in the catalog: above the item's own average.
select sum(cs_ext_discount_amt) as excess_discount_amount
from catalog_sales
join item on i_item_sk = cs_item_sk
join date_dim on d_date_sk = cs_sold_date_sk
where i_manufact_id = 977
  and d_date between date '2000-01-27' and date '2000-01-27' + interval 90 days
  and cs_ext_discount_amt > (
    select 1.3 * avg(other.cs_ext_discount_amt)
    from catalog_sales as other
    join date_dim as day on day.d_date_sk = other.cs_sold_date_sk
    where other.cs_item_sk = i_item_sk
      and day.d_date between date '2000-01-27' and date '2000-01-27' + interval 90 days
  )
limit 100
