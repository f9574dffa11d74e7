-- Quantities of items bought, returned and bought again by catalog.
select
  i_item_id, i_item_desc, s_store_id, s_store_name,
  sum(ss_quantity) as store_sales_quantity,
  sum(sr_return_quantity) as store_returns_quantity,
  sum(cs_quantity) as catalog_sales_quantity
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
where sold.d_moy = 9 and sold.d_year = 1999
  and returned.d_moy between 9 and 9 + 3 and returned.d_year = 1999
  and again.d_year in (1999, 1999 + 1, 1999 + 2)
group by i_item_id, i_item_desc, s_store_id, s_store_name
order by
  i_item_id, i_item_desc, s_store_id, s_store_name, store_sales_quantity, store_returns_quantity,
  catalog_sales_quantity
limit 100
