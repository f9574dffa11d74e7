-- States whose customers buy expensive items: a scalar subquery for the month, a correlated average.
select ca_state as state, count(*) as cnt
from customer_address
join customer on c_current_addr_sk = ca_address_sk
join store_sales on ss_customer_sk = c_customer_sk
join date_dim on d_date_sk = ss_sold_date_sk
join item on i_item_sk = ss_item_sk
where d_month_seq = (select distinct m.d_month_seq from date_dim as m where m.d_year = 2001 and m.d_moy = 1)
  and i_current_price > 1.2 * (
    select avg(other.i_current_price) from item as other where other.i_category = item.i_category
  )
group by ca_state
having count(*) >= 10
order by cnt, state
limit 100
