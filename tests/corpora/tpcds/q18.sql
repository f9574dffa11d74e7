-- Averages by item and place with all subtotals: ROLLUP of four columns, one table twice.
select
  i_item_id, ca_country, ca_state, ca_county,
  avg(cast(cs_quantity as decimal(12,2))) as agg1,
  avg(cast(cs_list_price as decimal(12,2))) as agg2,
  avg(cast(cs_coupon_amt as decimal(12,2))) as agg3,
  avg(cast(cs_sales_price as decimal(12,2))) as agg4,
  avg(cast(cs_net_profit as decimal(12,2))) as agg5,
  avg(cast(c_birth_year as decimal(12,2))) as agg6,
  avg(cast(billed.cd_dep_count as decimal(12,2))) as agg7
from catalog_sales
join customer_demographics as billed on billed.cd_demo_sk = cs_bill_cdemo_sk
join customer on c_customer_sk = cs_bill_customer_sk
join customer_demographics as own on own.cd_demo_sk = c_current_cdemo_sk
join customer_address on ca_address_sk = c_current_addr_sk
join date_dim on d_date_sk = cs_sold_date_sk
join item on i_item_sk = cs_item_sk
where billed.cd_gender = 'F' and billed.cd_education_status = 'Unknown'
  and c_birth_month in (1, 6, 8, 9, 12, 2)
  and d_year = 1998
  and ca_state in ('MS', 'IN', 'ND', 'OK', 'NM', 'VA')
group by rollup (i_item_id, ca_country, ca_state, ca_county)
order by ca_country, ca_state, ca_county, i_item_id, agg1, agg2, agg3, agg4, agg5, agg6, agg7
limit 100
