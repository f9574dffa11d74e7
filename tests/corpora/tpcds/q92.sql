-- Excess discounts on the web: above the item's own average.
select sum(ws_ext_discount_amt) as excess_discount_amount
from web_sales
join item on i_item_sk = ws_item_sk
join date_dim on d_date_sk = ws_sold_date_sk
where i_manufact_id = 350
  and d_date between date '2000-01-27' and date '2000-01-27' + interval 90 days
  and ws_ext_discount_amt > (
    select 1.3 * avg(other.ws_ext_discount_amt)
    from web_sales as other
    join date_dim as day on day.d_date_sk = other.ws_sold_date_sk
    where other.ws_item_sk = i_item_sk
      and day.d_date between date '2000-01-27' and date '2000-01-27' + interval 90 days
  )
order by excess_discount_amount
limit 100
