-- Tickets of customers who bought away from home at the start of a month.
select
  c_last_name, c_first_name, home.ca_city, bought_city, ss_ticket_number, extended_price,
  extended_tax, list_price
from (
  select
    ss_ticket_number, ss_customer_sk, ca_city as bought_city,
    sum(ss_ext_sales_price) as extended_price, sum(ss_ext_list_price) as list_price,
    sum(ss_ext_tax) as extended_tax
  from store_sales
  join date_dim on d_date_sk = ss_sold_date_sk
  join store on s_store_sk = ss_store_sk
  join household_demographics on hd_demo_sk = ss_hdemo_sk
  join customer_address on ca_address_sk = ss_addr_sk
  where d_dom between 1 and 2
    and (hd_dep_count = 4 or hd_vehicle_count = 3)
    and d_year in (1999, 1999 + 1, 1999 + 2)
    and s_city in ('Midway', 'Fairview')
  group by ss_ticket_number, ss_customer_sk, ss_addr_sk, ca_city
) as tickets
join customer on c_customer_sk = ss_customer_sk
join customer_address as home on home.ca_address_sk = c_current_addr_sk
where home.ca_city <> bought_city
order by
  c_last_name, ss_ticket_number, c_first_name, home.ca_city, bought_city, extended_price,
  extended_tax, list_price
limit 100
