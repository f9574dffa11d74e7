-- Items bought, returned and bought again by catalog: standard deviations of three quantities.
select
  i_item_id, i_item_desc, s_state,
  count(ss_quantity) as sales_count,
  avg(ss_quantity) as sales_average,
  stddev_samp(ss_quantity) as sales_spread,
  stddev_samp(ss_quantity) / avg(ss_quantity) as sales_cov,
  count(sr_return_quantity) as returns_count,
  avg(sr_return_quantity) as returns_average,
  stddev_samp(sr_return_quantity) as returns_spread,
  stddev_samp(sr_return_quantity) / avg(sr_return_quantity) as returns_cov,
  count(cs_quantity) as catalog_count,
  avg(cs_quantity) as catalog_average,
  stddev_samp(cs_quantity) as catalog_spread,
  stddev_samp(cs_quantity) / avg(cs_quantity) as catalog_cov
from store_sales
join store_returns
  on sr_customer_sk = ss_customer_sk and sr_item_sk = ss_item_sk
  and sr_ticket_number = ss_ticket_number
join catalog_sales on cs_bill_customer_sk = sr_customer_sk and cs_item_sk = sr_item_sk
join date_dim as sold on sold.d_date_sk = ss_sold_date_sk
join date_dim as returned on returned.d_date_sk = sr_returned_date_sk
join date_dim as again on again.d_date_sk = cs_sold_date_sk
join store on s_store_sk = ss_store_sk
join item on i_item_sk = ss_item_sk
where sold.d_quarter_name = '2001Q1'
  and returned.d_quarter_name in ('2001Q1', '2001Q2', '2001Q3')
  and again.d_quarter_name in ('2001Q1', '2001Q2', '2001Q3')
group by i_item_id, i_item_desc, s_state
order by i_item_id, i_item_desc, s_state
limit 100
