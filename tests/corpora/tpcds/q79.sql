-- Tickets at stores of a certain size on Mondays.
select
  c_last_name, c_first_name, substr(s_city, 1, 30) as city, ss_ticket_number, amt, profit
from (
  select
    ss_ticket_number, ss_customer_sk, s_city, sum(ss_coupon_amt) as amt,
    sum(ss_net_profit) as profit
  from store_sales
  join date_dim on d_date_sk = ss_sold_date_sk
  join store on s_store_sk = ss_store_sk
  join household_demographics on hd_demo_sk = ss_hdemo_sk
  where (hd_dep_count = 6 or hd_vehicle_count > 2)
    and d_dow = 1
    and d_year in (1999, 1999 + 1, 1999 + 2)
    and s_number_employees between 200 and 295
  group by ss_ticket_number, ss_customer_sk, ss_addr_sk, s_city
) as tickets
join customer on c_customer_sk = ss_customer_sk
order by c_last_name, c_first_name, city, profit, ss_ticket_number, amt
limit 100
