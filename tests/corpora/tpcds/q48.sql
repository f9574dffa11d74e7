-- One sum over two disjunctions.
select sum(ss_quantity) as quantity
from store_sales
join store on s_store_sk = ss_store_sk
join customer_demographics on cd_demo_sk = ss_cdemo_sk
join customer_address on ca_address_sk = ss_addr_sk
join date_dim on d_date_sk = ss_sold_date_sk
where d_year = 2000
  and (
    (cd_marital_status = 'M' and cd_education_status = '4 yr Degree'
      and ss_sales_price between 100.00 and 150.00)
    or (cd_marital_status = 'D' and cd_education_status = '2 yr Degree'
      and ss_sales_price between 50.00 and 100.00)
    or (cd_marital_status = 'S' and cd_education_status = 'College'
      and ss_sales_price between 150.00 and 200.00)
  )
  and ca_country = 'United States'
  and (
    (ca_state in ('CO', 'OH', 'TX') and ss_net_profit between 0 and 2000)
    or (ca_state in ('OR', 'MN', 'KY') and ss_net_profit between 150 and 3000)
    or (ca_state in ('VA', 'CA', 'MS') and ss_net_profit between 50 and 25000)
  )
