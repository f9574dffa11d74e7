-- Customers with small tickets on some days.
select
  c_last_name, c_first_name, c_salutation, c_preferred_cust_flag, ss_ticket_number, cnt
from (
  select ss_ticket_number, ss_customer_sk, count(*) as cnt
  from store_sales
  join date_dim on d_date_sk = ss_sold_date_sk
  join store on s_store_sk = ss_store_sk
  join household_demographics on hd_demo_sk = ss_hdemo_sk
  where d_dom between 1 and 2
    and hd_buy_potential in ('>10000', 'unknown')
    and hd_vehicle_count > 0
    and case when hd_vehicle_count > 0 then hd_dep_count / hd_vehicle_count end > 1
    and d_year in (1999, 1999 + 1, 1999 + 2)
    and s_county in ('Williamson County', 'Franklin Parish', 'Bronx County', 'Orange County')
  group by ss_ticket_number, ss_customer_sk
) as tickets
join customer on c_customer_sk = ss_customer_sk
where cnt between 1 and 5
order by cnt desc, c_last_name, c_first_name, ss_ticket_number
