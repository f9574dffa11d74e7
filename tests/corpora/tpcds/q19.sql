-- Brands sold away from home: an inequality between two sides of a join.
select
  i_brand_id as brand_id, i_brand as brand, i_manufact_id, i_manufact,
  sum(ss_ext_sales_price) as ext_price
from store_sales
join date_dim on d_date_sk = ss_sold_date_sk
join item on i_item_sk = ss_item_sk
join customer on c_customer_sk = ss_customer_sk
join customer_address on ca_address_sk = c_current_addr_sk
join store on s_store_sk = ss_store_sk
where i_manager_id = 8 and d_moy = 11 and d_year = 1998
  and substr(ca_zip, 1, 5) <> substr(s_zip, 1, 5)
group by i_brand, i_brand_id, i_manufact_id, i_manufact
order by ext_price desc, brand, brand_id, i_manufact_id, i_manufact
limit 100
