-- How many customers buy only in stores on a day: EXCEPT.
select count(*) as customers
from (
  select distinct c_last_name, c_first_name, d_date
  from store_sales
  join date_dim on d_date_sk = ss_sold_date_sk
  join customer on c_customer_sk = ss_customer_sk
  where d_month_seq between 1200 and 1200 + 11
  except
  select distinct c_last_name, c_first_name, d_date
  from catalog_sales
  join date_dim on d_date_sk = cs_sold_date_sk
  join customer on c_customer_sk = cs_bill_customer_sk
  where d_month_seq between 1200 and 1200 + 11
  except
  select distinct c_last_name, c_first_name, d_date
  from web_sales
  join date_dim on d_date_sk = ws_sold_date_sk
  join customer on c_customer_sk = ws_bill_customer_sk
  where d_month_seq between 1200 and 1200 + 11
) as cool
